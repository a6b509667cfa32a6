// A client of Kafka's own library: makes a topic, writes to it in every way, reads it by both protocols, administers.
import java.time.Duration;
import java.util.*;
import java.util.concurrent.*;
import java.util.regex.Pattern;
import org.apache.kafka.clients.admin.*;
import org.apache.kafka.clients.consumer.*;
import org.apache.kafka.clients.producer.*;
import org.apache.kafka.common.*;
import org.apache.kafka.common.config.ConfigResource;
import org.apache.kafka.common.errors.*;
import org.apache.kafka.common.quota.ClientQuotaFilter;
import org.apache.kafka.common.serialization.*;

public class JavaClient {
    static String bootstrap;

    static Map<String, Object> settings(Object... pairs) {
        Map<String, Object> found = new HashMap<>();
        found.put("bootstrap.servers", bootstrap);
        for (int i = 0; i < pairs.length; i += 2) found.put((String) pairs[i], pairs[i + 1]);
        return found;
    }

    static <T> T await(KafkaFuture<T> future) throws Exception {
        return future.get(20, TimeUnit.SECONDS);
    }

    static void expect(Object found, Object expected) {
        if (!Objects.equals(found, expected)) throw new AssertionError("found " + found + ", expected " + expected);
    }

    static KafkaProducer<String, String> producer(Object... pairs) {
        return new KafkaProducer<>(settings(pairs), new StringSerializer(), new StringSerializer());
    }

    static int consumed(String topic, String protocol, Object subscription, int count) {
        try (KafkaConsumer<String, String> consumer = new KafkaConsumer<>(
                settings("group.id", topic + "-" + protocol + "-" + subscription.getClass().getSimpleName(),
                    "group.protocol", protocol, "auto.offset.reset", "earliest", "isolation.level", "read_committed",
                    "metadata.max.age.ms", 1000),
                new StringDeserializer(), new StringDeserializer())) {
            if (subscription instanceof SubscriptionPattern pattern) consumer.subscribe(pattern);
            else if (subscription instanceof Pattern pattern) consumer.subscribe(pattern);
            else consumer.subscribe(List.of((String) subscription));
            int found = 0;
            long end = System.currentTimeMillis() + 20000;
            while (found < count && System.currentTimeMillis() < end)
                for (var one : consumer.poll(Duration.ofMillis(200))) {
                    if (one.value().equals("aborted")) throw new AssertionError("an aborted record was seen");
                    found++;
                }
            consumer.commitSync();
            return found;
        }
    }

    public static void main(String[] arguments) {
        try {
            run(arguments);
            System.out.println("all is as expected");
        } catch (Throwable failure) {
            failure.printStackTrace();
            System.exit(1);
        }
    }

    @SuppressWarnings("removal")
    static void run(String[] arguments) throws Exception {
        bootstrap = arguments[0];
        String topic = arguments[1];
        TopicPartition first = new TopicPartition(topic, 0);
        int count = 0;
        try (Admin admin = Admin.create(settings())) {
            await(admin.createTopics(List.of(new NewTopic(topic, 3, (short) 1))).all());
            expect(await(admin.describeTopics(List.of(topic)).allTopicNames()).get(topic).partitions().size(), 3);
        }
        for (String codec : List.of("none", "gzip", "snappy", "lz4", "zstd"))
            try (KafkaProducer<String, String> producer = producer("compression.type", codec)) {
                List<Future<RecordMetadata>> sent = new ArrayList<>();
                for (int i = 0; i < 100; i++) sent.add(producer.send(new ProducerRecord<>(topic, "k" + i, codec + i)));
                for (var one : sent) one.get(20, TimeUnit.SECONDS);
                count += 100;
            }
        try (KafkaProducer<String, String> producer = producer("transactional.id", topic + "-tx")) {
            producer.initTransactions();
            for (String outcome : List.of("committed", "aborted", "committed", "empty", "committed")) {
                producer.beginTransaction();
                if (!outcome.equals("empty"))
                    for (int i = 0; i < 3; i++) producer.send(new ProducerRecord<>(topic, i, "a", outcome));
                producer.sendOffsetsToTransaction(Map.of(first, new OffsetAndMetadata(count, outcome)),
                    new ConsumerGroupMetadata(topic + "-in-transaction"));
                if (outcome.equals("aborted")) {
                    producer.flush();
                    producer.abortTransaction();
                } else {
                    producer.commitTransaction();
                    if (!outcome.equals("empty")) count += 3;
                }
            }
            // Whoever comes by the same name fences the one before, even one with a transaction open.
            producer.beginTransaction();
            producer.send(new ProducerRecord<>(topic, "a", "aborted"));
            producer.flush();
            try (KafkaProducer<String, String> heir = producer("transactional.id", topic + "-tx")) {
                heir.initTransactions();
                try {
                    producer.commitTransaction();
                    throw new AssertionError("a producer that was fenced could commit");
                } catch (ProducerFencedException | InvalidProducerEpochException expected) {
                    heir.beginTransaction();
                    heir.send(new ProducerRecord<>(topic, "a", "committed"));
                    heir.commitTransaction();
                    count++;
                }
            }
        }
        expect(consumed(topic, "classic", topic, count), count);
        expect(consumed(topic, "consumer", topic, count), count);
        expect(consumed(topic, "consumer", new SubscriptionPattern(topic + ".*"), count), count);
        try (Admin admin = Admin.create(settings())) {
            var offsets = await(admin.listConsumerGroupOffsets(topic + "-in-transaction").partitionsToOffsetAndMetadata());
            expect(offsets.get(first).metadata(), "committed");
            ConfigResource resource = new ConfigResource(ConfigResource.Type.TOPIC, topic);
            await(admin.incrementalAlterConfigs(Map.of(resource, List.of(
                new AlterConfigOp(new ConfigEntry("retention.bytes", "1000000"), AlterConfigOp.OpType.SET)))).all());
            Config config = await(admin.describeConfigs(List.of(resource)).all()).get(resource);
            expect(config.get("retention.bytes").value(), "1000000");
            var brokers = await(admin.describeCluster().nodes());
            ConfigResource broker = new ConfigResource(ConfigResource.Type.BROKER, brokers.iterator().next().idString());
            expect(await(admin.describeConfigs(List.of(broker)).all()).get(broker).get("node.id").value(), broker.name());
            long size = 0;
            for (var directories : await(admin.describeLogDirs(brokers.stream().map(Node::id).toList()).allDescriptions()).values())
                for (var directory : directories.values())
                    for (var replica : directory.replicaInfos().entrySet())
                        if (replica.getKey().topic().equals(topic)) size += replica.getValue().size();
            if (size < count) throw new AssertionError("a topic of " + count + " records has " + size + " bytes");
            expect(await(admin.deleteRecords(Map.of(first, RecordsToDelete.beforeOffset(5))).all()) == null, true);
            var earliest = await(admin.listOffsets(Map.of(first, OffsetSpec.earliest())).all()).get(first);
            expect(earliest.offset(), 5L);
            expect(await(admin.listTransactions().all()).stream().anyMatch(one -> one.transactionalId().equals(topic + "-tx")), true);
            var state = await(admin.describeTransactions(List.of(topic + "-tx")).all()).get(topic + "-tx");
            // Each of its transactions had an epoch of its own, not only each of its producers.
            if (state.producerEpoch() < 5) throw new AssertionError("the epoch is only " + state.producerEpoch());
            await(admin.describeProducers(List.of(first)).all());
            expect(await(admin.describeClientQuotas(ClientQuotaFilter.all()).entities()).size(), 0);
            expect(await(admin.listPartitionReassignments().reassignments()).size(), 0);
            await(admin.electLeaders(ElectionType.PREFERRED, null).all());
            await(admin.describeUserScramCredentials().all());
            await(admin.listConfigResources().all());
            await(admin.deleteConsumerGroupOffsets(topic + "-in-transaction", Set.of(first)).all());
            expect(await(admin.listGroups().all()).stream().anyMatch(one -> one.groupId().equals(topic + "-classic-String")), true);
            await(admin.describeConsumerGroups(List.of(topic + "-classic-String")).all());
            await(admin.createPartitions(Map.of(topic, NewPartitions.increaseTo(5))).all());
            await(admin.deleteConsumerGroups(List.of(topic + "-classic-String")).all());
            await(admin.deleteTopics(List.of(topic)).all());
        }
    }
}
