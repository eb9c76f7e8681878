"""rdzvrun's command line: how it is parsed, and how it determines where the job's nodes meet."""
