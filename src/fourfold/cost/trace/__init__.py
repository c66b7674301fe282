"""What does every step of a parallel layer do on one rank? Steps as data, without torch."""
