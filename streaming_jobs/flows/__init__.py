"""The streams shipped with Recourse. Every module here declares streams and nothing else."""
