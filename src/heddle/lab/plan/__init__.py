"""What training costs on many GPUs, before renting them: memory, communication, speed."""
