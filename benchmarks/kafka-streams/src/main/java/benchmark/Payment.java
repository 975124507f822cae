package benchmark;

import com.fasterxml.jackson.annotation.JsonIgnore;
import com.fasterxml.jackson.annotation.JsonInclude;
import java.time.Instant;

/** One payment, in and out; {@code net} is there only in the output. Money in cents. */
@JsonInclude(JsonInclude.Include.NON_NULL)
public final class Payment {
    public long id;
    public String account;
    public long amount;
    public Instant at;
    public String kind;
    public String currency;
    public String country;
    public Long net;

    @JsonIgnore
    public Payment withNet() {
        net = amount - amount / 100;
        return this;
    }
}
