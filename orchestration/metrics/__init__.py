"""Figures of the streams for Prometheus and OpenTelemetry, from files alone. Read `figures.py` first."""
