// A client of kafkajs that makes a topic, writes to it in every way, and reads it: prints what it found as JSON.
const { Kafka, CompressionTypes, logLevel } = require('kafkajs')

const [bootstrap, topic] = process.argv.slice(2)
const kafka = new Kafka({ clientId: 'js', brokers: bootstrap.split(','), logLevel: logLevel.NOTHING })

async function main() {
  const admin = kafka.admin()
  await admin.connect()
  await admin.createTopics({ topics: [{ topic, numPartitions: 3 }] })
  const brokers = (await admin.describeCluster()).brokers.length

  const producer = kafka.producer({ idempotent: true, maxInFlightRequests: 1 })
  await producer.connect()
  for (let batch = 0; batch < 10; batch++) {
    const compression = batch % 2 ? CompressionTypes.GZIP : CompressionTypes.None
    const messages = []
    for (let i = 0; i < 10; i++) messages.push({ key: `k${i}`, value: `${batch * 10 + i}`, headers: { h: 'ü' } })
    await producer.send({ topic, compression, messages })
  }

  const transactional = kafka.producer({ transactionalId: `${topic}-tx`, idempotent: true, maxInFlightRequests: 1 })
  await transactional.connect()
  for (const outcome of ['aborted', 'committed']) {
    const transaction = await transactional.transaction()
    await transaction.send({ topic, messages: [{ value: outcome }] })
    await (outcome === 'committed' ? transaction.commit() : transaction.abort())
  }

  const consumer = kafka.consumer({ groupId: `${topic}-group` })
  await consumer.connect()
  await consumer.subscribe({ topic, fromBeginning: true })
  const values = []
  let header
  await new Promise((resolve) => consumer.run({
    eachMessage: async ({ message }) => {
      values.push(message.value.toString())
      if (message.headers.h) header = message.headers.h.toString()
      if (values.length === 101) resolve()
    },
  }))
  const state = (await admin.describeGroups([`${topic}-group`])).groups[0].state
  await consumer.disconnect()
  const committed = await admin.fetchOffsets({ groupId: `${topic}-group`, topics: [topic] })
  const offsets = committed[0].partitions.map((one) => Number(one.offset)).reduce((a, b) => a + Math.max(b, 0), 0)
  const ends = await admin.fetchTopicOffsets(topic)
  await admin.deleteTopicRecords({ topic, partitions: ends.map(({ partition, high }) => ({ partition, offset: high })) })
  const lows = (await admin.fetchTopicOffsets(topic)).map((one) => Number(one.low)).reduce((a, b) => a + b, 0)
  await Promise.all([producer.disconnect(), transactional.disconnect(), admin.disconnect()])
  console.log(JSON.stringify({ brokers, values, header, state, offsets, lows }))
}

main().catch((error) => {
  console.error(error)
  process.exit(1)
})
