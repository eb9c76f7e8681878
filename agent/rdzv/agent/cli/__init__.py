"""rdzvrun's command line on this node: its meaning, and where the job's nodes meet."""
