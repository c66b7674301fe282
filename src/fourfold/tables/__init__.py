"""Tables: read, write and check the styles in which layouts and speeds are published."""
