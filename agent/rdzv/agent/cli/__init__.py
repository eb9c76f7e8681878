"""rdzvrun's command line on this node: its meaning, and where the nodes of the job meet."""
