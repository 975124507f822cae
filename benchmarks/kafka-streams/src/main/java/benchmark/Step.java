package benchmark;

/** A payment, and the amount of the payment of its account before it; 0 for the first. */
public record Step(long id, String account, long amount, long previous) {}
