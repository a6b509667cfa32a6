// A client of kafkajs that reads, writes what it read elsewhere, and commits both in one transaction.
const { Kafka, logLevel } = require('kafkajs')

const [bootstrap, source, target] = process.argv.slice(2)
const kafka = new Kafka({ clientId: 'js', brokers: bootstrap.split(','), logLevel: logLevel.NOTHING })
const groupId = `${source}-group`

async function main() {
  const producer = kafka.producer({ transactionalId: `${source}-tx`, idempotent: true, maxInFlightRequests: 1 })
  const consumer = kafka.consumer({ groupId, readUncommitted: false })
  const admin = kafka.admin()
  await Promise.all([producer.connect(), consumer.connect(), admin.connect()])
  await consumer.subscribe({ topic: source, fromBeginning: true })
  const committed = async () => (await admin.fetchOffsets({ groupId, topics: [source] }))[0].partitions[0].offset
  const seen = []
  // While the group has a member: the request does not say which.
  await new Promise((resolve, reject) => consumer.run({
    autoCommit: false,
    eachBatch: async ({ batch }) => {
      try {
        for (const outcome of ['abort', 'commit']) {
          const transaction = await producer.transaction()
          const messages = batch.messages.map(({ value }) => ({ value: `${outcome} ${value}` }))
          await transaction.send({ topic: target, messages })
          const partitions = [{ partition: batch.partition, offset: `${Number(batch.lastOffset()) + 1}` }]
          await transaction.sendOffsets({ consumerGroupId: groupId, topics: [{ topic: source, partitions }] })
          await transaction[outcome]()
          seen.push(await committed())
        }
        resolve()
      } catch (error) {
        reject(error)
      }
    },
  }))
  await Promise.all([consumer.disconnect(), producer.disconnect(), admin.disconnect()])
  console.log(JSON.stringify({ committed: seen }))
}

main().catch((error) => {
  console.error(error)
  process.exit(1)
})
