"""Every step of a parallel layer on one rank: steps as data, without torch."""
