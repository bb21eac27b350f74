"""The course: what notebooks show and check, and what executes them."""
