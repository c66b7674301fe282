"""What a device and its links can do, measured by small known loads."""
