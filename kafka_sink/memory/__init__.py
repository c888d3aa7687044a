"""buffer.memory (KAFKA-20576): a pool of chunks, and batches' buffers made of them."""
