"""The memory of buffer.memory (KAFKA-20576): a pool of chunks, and the buffers of batches made from
chunks."""
