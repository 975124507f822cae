"""Starts of streams and deploys of code, from outside their sessions: plan, request, wait. Read `plan.py` first."""
