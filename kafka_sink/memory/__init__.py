"""The memory of buffer.memory (KAFKA-20576): a pool of chunks, and batches' buffers of chunks."""
