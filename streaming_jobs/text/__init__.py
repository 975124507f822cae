"""Text for people and engines: names, durations, SQL, SVG."""
