import java.io.BufferedInputStream;
import java.io.BufferedOutputStream;
import java.io.BufferedReader;
import java.io.DataInputStream;
import java.io.DataOutputStream;
import java.io.FileInputStream;
import java.io.FileOutputStream;
import java.io.InputStreamReader;
import java.nio.ByteBuffer;
import org.apache.kafka.common.compress.Compression;
import org.apache.kafka.common.header.Header;
import org.apache.kafka.common.header.internals.RecordHeader;
import org.apache.kafka.common.record.*;
import org.apache.kafka.common.record.internal.*;
import org.apache.kafka.common.record.internal.Record;
import org.apache.kafka.common.utils.Utils;

/**
 * Kafka's own classes as the judge of the sink's bytes. Each line of stdin is a verb; once it is carried out, a line
 * "done" goes to stdout. Input and output are the binary files that are named on the command line, of big-endian
 * fields; a byte string is an int length (-1: null) and its bytes.
 *
 * build: cases of (producerId long, epoch short, sequence int, count int, records of timestamp long, key, value,
 *        header count int, headers of key and value); writes each uncompressed batch as a byte string.
 * read:  batches as byte strings; writes per batch its count and its records in the same form, preceded by
 *        codec int, producerId long, epoch short, sequence int; checks CRC, offsets and sizes on the way.
 * hash:  keys; writes murmur2 of each as an int.
 */
public class Oracle {
    public static void main(String[] args) throws Exception {
        BufferedReader verbs = new BufferedReader(new InputStreamReader(System.in));
        for (String verb = verbs.readLine(); verb != null; verb = verbs.readLine()) {
            carryOut(verb, args[0], args[1]);
            System.out.println("done");
        }
    }

    private static void carryOut(String verb, String asked, String answered) throws Exception {
        try (DataInputStream in = new DataInputStream(new BufferedInputStream(new FileInputStream(asked)));
                DataOutputStream out =
                        new DataOutputStream(new BufferedOutputStream(new FileOutputStream(answered)))) {
            int cases = in.readInt();
            for (int i = 0; i < cases; i++) {
                switch (verb) {
                    case "build" -> build(in, out);
                    case "read" -> read(in, out);
                    case "hash" -> out.writeInt(Utils.murmur2(bytes(in)));
                    default -> throw new IllegalArgumentException(verb);
                }
            }
        }
    }

    private static byte[] bytes(DataInputStream in) throws Exception {
        int length = in.readInt();
        if (length < 0) return null;
        byte[] data = new byte[length];
        in.readFully(data);
        return data;
    }

    private static void put(DataOutputStream out, ByteBuffer data) throws Exception {
        if (data == null) {
            out.writeInt(-1);
            return;
        }
        byte[] copy = Utils.toArray(data);
        out.writeInt(copy.length);
        out.write(copy);
    }

    private static void build(DataInputStream in, DataOutputStream out) throws Exception {
        long producerId = in.readLong();
        short epoch = in.readShort();
        int sequence = in.readInt();
        int count = in.readInt();
        MemoryRecordsBuilder builder = MemoryRecords.builder(ByteBuffer.allocate(1024), RecordBatch.MAGIC_VALUE_V2,
                Compression.NONE, TimestampType.CREATE_TIME, 0L, RecordBatch.NO_TIMESTAMP, producerId, epoch,
                sequence, false, RecordBatch.NO_PARTITION_LEADER_EPOCH);
        for (int i = 0; i < count; i++) {
            long timestamp = in.readLong();
            byte[] key = bytes(in);
            byte[] value = bytes(in);
            Header[] headers = new Header[in.readInt()];
            for (int h = 0; h < headers.length; h++) headers[h] = new RecordHeader(new String(bytes(in), "UTF-8"), bytes(in));
            builder.append(timestamp, key, value, headers);
        }
        put(out, builder.build().buffer());
    }

    private static void read(DataInputStream in, DataOutputStream out) throws Exception {
        MemoryRecords records = MemoryRecords.readableRecords(ByteBuffer.wrap(bytes(in)));
        int batches = 0;
        for (MutableRecordBatch batch : records.batches()) {
            if (++batches > 1) throw new IllegalStateException("more than one batch");
            batch.ensureValid();
            out.writeInt(batch.compressionType().id);
            out.writeLong(batch.producerId());
            out.writeShort(batch.producerEpoch());
            out.writeInt(batch.baseSequence());
            out.writeInt(batch.countOrNull());
            long offset = 0;
            long latest = Long.MIN_VALUE;
            for (Record record : batch) {
                if (record.offset() != offset++) throw new IllegalStateException("offset " + record.offset());
                latest = Math.max(latest, record.timestamp());
                out.writeLong(record.timestamp());
                put(out, record.key());
                put(out, record.value());
                out.writeInt(record.headers().length);
                for (Header header : record.headers()) {
                    put(out, ByteBuffer.wrap(header.key().getBytes("UTF-8")));
                    put(out, header.value() == null ? null : ByteBuffer.wrap(header.value()));
                }
            }
            if (batch.maxTimestamp() != latest) throw new IllegalStateException("max timestamp " + batch.maxTimestamp());
            if (batch.lastOffset() != offset - 1) throw new IllegalStateException("last offset " + batch.lastOffset());
        }
    }
}
