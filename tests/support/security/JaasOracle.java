// Reads JAAS texts as Kafka's clients do: one per line, Base64; prints module and options, Base64, or "refused".
import java.nio.charset.StandardCharsets;
import java.util.*;
import org.apache.kafka.common.config.types.Password;
import org.apache.kafka.common.security.JaasContext;

public class JaasOracle {
  static String encode(String text) {
    return Base64.getEncoder().encodeToString(text.getBytes(StandardCharsets.UTF_8));
  }

  public static void main(String[] args) {
    for (var scanner = new Scanner(System.in); scanner.hasNextLine(); ) {
      var text = new String(Base64.getDecoder().decode(scanner.nextLine()), StandardCharsets.UTF_8);
      var line = new StringBuilder();
      try {
        var context = JaasContext.loadClientContext(Map.of("sasl.jaas.config", new Password(text)));
        var entry = context.configurationEntries().get(0);
        line.append(encode(entry.getLoginModuleName()));
        for (var option : new TreeMap<>(entry.getOptions()).entrySet())
          line.append(' ').append(encode(option.getKey())).append('=').append(encode("" + option.getValue()));
      } catch (RuntimeException refused) {
        // Also an option without a name, which Java takes for null and no module can find.
        line.setLength(0);
        line.append("refused");
      }
      System.out.println(line);
    }
  }
}
