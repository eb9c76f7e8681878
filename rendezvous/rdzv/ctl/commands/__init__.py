"""The commands of rdzvctl, one file a subject: options, one call of the client, what is shown."""
