"""Pipeline schedules: action lists, their simulation, their timeline."""
