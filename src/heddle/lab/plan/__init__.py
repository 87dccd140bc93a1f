"""What a training costs on many GPUs, before any of them is rented: memory, communication, speed."""
