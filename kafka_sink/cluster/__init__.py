"""What a producer knows of its cluster: one object for each broker and for each partition."""
