// Prints the names that Kafka's producer has: "option <name>\t<default>", "metric <name>",
// "error <code> <name> <whether it is retriable> <whether it makes metadata invalid>", and "other <name>" for the
// options of its consumer and admin clients.
// Run as a source file with Kafka's jars on the class path.

import java.util.Map;
import java.util.TreeSet;
import org.apache.kafka.clients.admin.AdminClientConfig;
import org.apache.kafka.clients.consumer.ConsumerConfig;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerConfig;
import org.apache.kafka.common.MetricName;
import org.apache.kafka.common.config.ConfigDef;
import org.apache.kafka.common.errors.InvalidMetadataException;
import org.apache.kafka.common.errors.RetriableException;
import org.apache.kafka.common.protocol.Errors;
import org.apache.kafka.common.serialization.ByteArraySerializer;

public class KafkaNames {
    public static void main(String[] arguments) {
        for (ConfigDef.ConfigKey key : ProducerConfig.configDef().configKeys().values()) {
            boolean none = key.defaultValue == ConfigDef.NO_DEFAULT_VALUE || key.defaultValue == null;
            String value = none ? "" : ConfigDef.convertToString(key.defaultValue, key.type);
            System.out.println("option " + key.name + "\t" + value);
        }
        ConsumerConfig.configNames().forEach(name -> System.out.println("other " + name));
        AdminClientConfig.configNames().forEach(name -> System.out.println("other " + name));
        // It has registered its metrics once it is made; nothing needs to listen.
        Map<String, Object> settings = Map.of(ProducerConfig.BOOTSTRAP_SERVERS_CONFIG, "127.0.0.1:1");
        TreeSet<String> metrics = new TreeSet<>();
        try (var producer =
                new KafkaProducer<>(settings, new ByteArraySerializer(), new ByteArraySerializer())) {
            for (MetricName metric : producer.metrics().keySet()) {
                if (metric.group().equals("producer-metrics")) {
                    metrics.add(metric.name());
                }
            }
            producer.close(java.time.Duration.ZERO);
        }
        metrics.forEach(name -> System.out.println("metric " + name));
        for (Errors error : Errors.values()) {
            boolean retriable = error.exception() instanceof RetriableException;
            boolean refreshes = error.exception() instanceof InvalidMetadataException;
            System.out.println(
                    "error " + error.code() + " " + error.name() + " " + retriable + " " + refreshes);
        }
    }
}
