"""rdzvrun's command line on this node: what its words mean, and where the nodes of the job meet."""
