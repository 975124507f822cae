"""Starts of streams and deploys of code, seen from outside their sessions: what is asked for, how far it has come."""
