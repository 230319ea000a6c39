"""The shared kernel: scheduler, block manager and the data that crosses their boundary."""
