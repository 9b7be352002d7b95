"""The memory that a transport may touch: one arena of KV pages and metadata rows per rank."""
