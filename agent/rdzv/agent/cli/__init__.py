"""rdzvrun's command line: parsing it, and choosing where the nodes of the job meet."""
