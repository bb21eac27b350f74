"""The lab: what makes results, from seeded runs to verdicts on claims, and what measures speed."""
