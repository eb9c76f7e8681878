"""A module beside the script."""

WHERE = "beside the script"
