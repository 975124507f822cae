package benchmark;

import org.apache.kafka.streams.processor.api.Processor;
import org.apache.kafka.streams.processor.api.ProcessorContext;
import org.apache.kafka.streams.processor.api.Record;
import org.apache.kafka.streams.state.KeyValueStore;

/** Keeps the amount of an account's last payment. */
final class Previous implements Processor<String, Payment, String, Step> {
    private ProcessorContext<String, Step> context;
    private KeyValueStore<String, Long> last;

    @Override
    public void init(ProcessorContext<String, Step> given) {
        context = given;
        last = given.getStateStore("last");
    }

    @Override
    public void process(Record<String, Payment> item) {
        Payment payment = item.value();
        Long before = last.get(payment.account);
        last.put(payment.account, payment.amount);
        Step step = new Step(payment.id, payment.account, payment.amount, before == null ? 0 : before);
        context.forward(item.withValue(step));
    }
}
