"""From runs to results: several seeds of one configuration, and the intervals that they allow."""
