package benchmark;

import java.io.IOException;
import java.time.Duration;
import java.util.Properties;
import org.apache.kafka.clients.consumer.ConsumerConfig;
import org.apache.kafka.common.serialization.Serde;
import org.apache.kafka.common.serialization.Serdes;
import org.apache.kafka.common.utils.Bytes;
import org.apache.kafka.streams.KafkaStreams;
import org.apache.kafka.streams.KeyValue;
import org.apache.kafka.streams.StreamsBuilder;
import org.apache.kafka.streams.StreamsConfig;
import org.apache.kafka.streams.errors.StreamsUncaughtExceptionHandler;
import org.apache.kafka.streams.kstream.Consumed;
import org.apache.kafka.streams.kstream.Grouped;
import org.apache.kafka.streams.kstream.JoinWindows;
import org.apache.kafka.streams.kstream.KGroupedStream;
import org.apache.kafka.streams.kstream.KStream;
import org.apache.kafka.streams.kstream.Materialized;
import org.apache.kafka.streams.kstream.Produced;
import org.apache.kafka.streams.kstream.SessionWindows;
import org.apache.kafka.streams.kstream.StreamJoined;
import org.apache.kafka.streams.kstream.Suppressed;
import org.apache.kafka.streams.kstream.Suppressed.BufferConfig;
import org.apache.kafka.streams.kstream.TimeWindows;
import org.apache.kafka.streams.state.KeyValueStore;
import org.apache.kafka.streams.state.SessionStore;
import org.apache.kafka.streams.state.Stores;
import org.apache.kafka.streams.state.WindowStore;

/**
 * The works with Kafka Streams, exactly once.
 *
 * <pre>java benchmark.Peer WORK BOOTSTRAP INPUT OUTPUT STATE_FOLDER</pre>
 *
 * Prints READY when its state is RUNNING, and ends when its standard input does.
 */
public final class Peer {
    private Peer() {}

    public static void main(String[] arguments) throws IOException {
        String work = arguments[0];
        String input = arguments[2];
        String output = arguments[3];
        StreamsBuilder builder = new StreamsBuilder();
        KStream<String, Payment> payments = payments(builder, input);
        switch (work) {
            case "stateless" -> stateless(payments, output);
            case "windowed" -> windowed(payments, output);
            case "running" -> running(payments, output);
            case "joined" -> joined(payments, payments(builder, input + ".confirmations"), output);
            case "sessions" -> sessions(payments, output);
            case "previous" -> previous(builder, payments, output);
            default -> throw new IllegalArgumentException("no such work: " + work);
        }
        run(builder, settings(output, arguments[1], arguments[4]));
    }

    private static KStream<String, Payment> payments(StreamsBuilder builder, String input) {
        return builder.stream(
            input,
            Consumed.with(Serdes.String(), Json.serde(Payment.class))
                .withTimestampExtractor((item, before) -> ((Payment) item.value()).at.toEpochMilli()));
    }

    private static void stateless(KStream<String, Payment> payments, String output) {
        payments
            .filter((account, payment) -> !payment.kind.equals("test"))
            .mapValues(Payment::withNet)
            .to(output, Produced.with(Serdes.String(), Json.serde(Payment.class)));
    }

    private static void windowed(KStream<String, Payment> payments, String output) {
        Materialized<String, Total, WindowStore<Bytes, byte[]>> state =
            Materialized.with(Serdes.String(), Json.serde(Total.class));
        grouped(payments)
            .windowedBy(TimeWindows.ofSizeAndGrace(Duration.ofSeconds(10), Duration.ofSeconds(5)))
            .aggregate(Total::new, (account, payment, total) -> total.add(account, payment.amount), state)
            .suppress(Suppressed.untilWindowCloses(BufferConfig.unbounded()))
            .toStream()
            .map((window, total) -> KeyValue.pair(window.key(), total.at(window.window().start())))
            .to(output, totals());
    }

    private static void running(KStream<String, Payment> payments, String output) {
        Materialized<String, Total, KeyValueStore<Bytes, byte[]>> state =
            Materialized.with(Serdes.String(), Json.serde(Total.class));
        grouped(payments)
            .aggregate(Total::new, (account, payment, total) -> total.add(account, payment.amount), state)
            .toStream()
            .to(output, totals());
    }

    private static void joined(
            KStream<String, Payment> payments, KStream<String, Payment> confirmations, String output) {
        JoinWindows second = JoinWindows
            .ofTimeDifferenceAndGrace(Duration.ofSeconds(1), Duration.ofSeconds(5))
            .before(Duration.ZERO);
        Serde<Payment> value = Json.serde(Payment.class);
        payments
            .join(
                confirmations,
                (payment, confirmation) -> new Pair(payment.id, payment.account, confirmation.id),
                second,
                StreamJoined.with(Serdes.String(), value, value))
            .to(output, Produced.with(Serdes.String(), Json.serde(Pair.class)));
    }

    private static void sessions(KStream<String, Payment> payments, String output) {
        Materialized<String, Total, SessionStore<Bytes, byte[]>> state =
            Materialized.with(Serdes.String(), Json.serde(Total.class));
        grouped(payments)
            .windowedBy(SessionWindows.ofInactivityGapAndGrace(Duration.ofSeconds(1), Duration.ofSeconds(5)))
            .aggregate(
                Total::new,
                (account, payment, total) -> total.add(account, payment.amount),
                (account, one, other) -> one.plus(other),
                state)
            .suppress(Suppressed.untilWindowCloses(BufferConfig.unbounded()))
            .toStream()
            .map((window, total) -> KeyValue.pair(window.key(), total.at(window.window().start())))
            .to(output, totals());
    }

    private static void previous(StreamsBuilder builder, KStream<String, Payment> payments, String output) {
        builder.addStateStore(
            Stores.keyValueStoreBuilder(Stores.persistentKeyValueStore("last"), Serdes.String(), Serdes.Long())
                .withCachingEnabled());
        payments
            .process(Previous::new, "last")
            .to(output, Produced.with(Serdes.String(), Json.serde(Step.class)));
    }

    private static KGroupedStream<String, Payment> grouped(KStream<String, Payment> payments) {
        return payments.groupByKey(Grouped.with(Serdes.String(), Json.serde(Payment.class)));
    }

    private static Produced<String, Total> totals() {
        return Produced.with(Serdes.String(), Json.serde(Total.class));
    }

    private static Properties settings(String application, String bootstrap, String folder) {
        Properties settings = new Properties();
        settings.put(StreamsConfig.APPLICATION_ID_CONFIG, application);
        settings.put(StreamsConfig.BOOTSTRAP_SERVERS_CONFIG, bootstrap);
        settings.put(StreamsConfig.STATE_DIR_CONFIG, folder);
        settings.put(StreamsConfig.PROCESSING_GUARANTEE_CONFIG, StreamsConfig.EXACTLY_ONCE_V2);
        settings.put(StreamsConfig.COMMIT_INTERVAL_MS_CONFIG, 100);
        settings.put(StreamsConfig.NUM_STREAM_THREADS_CONFIG, 2);
        settings.put(StreamsConfig.REPLICATION_FACTOR_CONFIG, 1);
        settings.put(ConsumerConfig.AUTO_OFFSET_RESET_CONFIG, "earliest");
        return settings;
    }

    private static void run(StreamsBuilder builder, Properties settings) throws IOException {
        KafkaStreams streams = new KafkaStreams(builder.build(), settings);
        streams.setUncaughtExceptionHandler(error -> {
            error.printStackTrace();
            Runtime.getRuntime().halt(1);
            return StreamsUncaughtExceptionHandler.StreamThreadExceptionResponse.SHUTDOWN_CLIENT;
        });
        streams.setStateListener((now, before) -> {
            if (now == KafkaStreams.State.RUNNING) {
                System.out.println("READY");
            }
        });
        streams.start();
        while (System.in.read() >= 0) {
            // Nothing is said there: its end is the word to end.
        }
        streams.close(Duration.ofSeconds(10));
        System.exit(0);
    }
}
