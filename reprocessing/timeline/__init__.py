"""The timeline of a stream: its batches, deploys, sessions, recoveries and savepoints, as text, data and a picture."""
