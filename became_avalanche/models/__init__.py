"""Networks of the papers, and small ones for small images."""
