"""Worker processes of the service and their supervisor."""
