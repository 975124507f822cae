package benchmark;

/** A payment, and a confirmation of its account. */
public record Pair(long id, String account, long confirmation) {}
