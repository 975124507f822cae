package benchmark;

/** Count and sum of an account; {@code start} is the window's, in ms since 1970, or 0 where there is none. */
public final class Total {
    public long start;
    public String account;
    public long count;
    public long total;

    public Total add(String owner, long amount) {
        account = owner;
        count += 1;
        total += amount;
        return this;
    }

    /** Both together; the one without payments has no account. */
    public Total plus(Total other) {
        account = other.account == null ? account : other.account;
        count += other.count;
        total += other.total;
        return this;
    }

    public Total at(long windowStart) {
        start = windowStart;
        return this;
    }
}
