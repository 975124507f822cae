"""How a stream is put right: rewind, rebuild beside the old output, check, publish. Nothing is in here yet."""
