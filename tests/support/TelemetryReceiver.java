import java.nio.ByteBuffer;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.StandardOpenOption;
import java.util.Base64;
import java.util.List;
import java.util.Map;
import org.apache.kafka.common.metrics.KafkaMetric;
import org.apache.kafka.common.metrics.MetricsReporter;
import org.apache.kafka.server.telemetry.ClientTelemetry;
import org.apache.kafka.server.telemetry.ClientTelemetryReceiver;

/**
 * Appends what clients push to the file named by {@code telemetry.file}, a line for each push. Hangs while a file with
 * ".hang" behind that name is there, and then makes one with ".hung".
 */
@SuppressWarnings("removal")
public class TelemetryReceiver implements MetricsReporter, ClientTelemetry {
    private Path file;

    public void configure(Map<String, ?> configs) {
        file = Path.of(configs.get("telemetry.file").toString());
    }

    public ClientTelemetryReceiver clientReceiver() {
        return (context, payload) -> {
            ByteBuffer data = payload.data().duplicate();
            byte[] bytes = new byte[data.remaining()];
            data.get(bytes);
            String line = String.join(" ", context.clientId(), payload.clientInstanceId().toString(),
                String.valueOf(payload.isTerminating()), Base64.getEncoder().encodeToString(bytes)) + "\n";
            try {
                while (Files.exists(Path.of(file + ".hang"))) {
                    Files.writeString(Path.of(file + ".hung"), context.clientId());
                    Thread.sleep(10);
                }
                Files.writeString(file, line, StandardOpenOption.CREATE, StandardOpenOption.APPEND);
            } catch (java.io.IOException | InterruptedException e) {
                throw new IllegalStateException(e);
            }
        };
    }

    public void init(List<KafkaMetric> metrics) { }

    public void metricChange(KafkaMetric metric) { }

    public void metricRemoval(KafkaMetric metric) { }

    public void close() { }
}
