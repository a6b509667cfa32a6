// Kafka consumer groups and their committed offsets.

import { get, path } from "../api.js";
import { atLeast, card, every, h, head, number, show, table, update, when } from "../ui.js";

export async function kafkaGroups() {
  const list = h("div");
  show(head("Kafka groups"), card(null, list));
  return every(3, async () => {
    const found = (await get("/v1/kafka/groups")).groups;
    update(list, table([
      { name: "Group", of: (g) => h("a", { href: `#/kafka/${encodeURIComponent(g.name)}` }, g.name) },
      { name: "Partitions", kind: "number", of: (g) => number(g.partitions) },
      { name: "Lag", kind: "number", of: (g) => atLeast(g.lag, g.lag_is_more) },
      { name: "Last commit", kind: "tight wide", of: (g) => when(g.committed_at) },
    ], found, { label: "Kafka groups", key: (g) => g.name, empty: "No Kafka consumer groups." }));
  }, list).stop;
}

export async function kafkaGroup(name) {
  const list = h("div");
  show(head(name), card("Offsets", list));
  return every(3, async () => {
    const found = await get(path`/v1/kafka/groups/${name}`);
    update(list, table([
      { name: "Topic", of: (o) => h("a", { href: `#/topics/${encodeURIComponent(o.topic)}` }, o.topic) },
      { name: "Partition", kind: "number", of: (o) => number(o.partition) },
      { name: "Committed", kind: "number", of: (o) => number(o.committed_offset) },
      { name: "End", kind: "number wide", of: (o) => number(o.end_offset) },
      { name: "Lag", kind: "number", of: (o) => atLeast(o.lag, o.lag_is_more) },
      { name: "Last commit", kind: "tight wide", of: (o) => when(o.committed_at) },
    ], found.offsets, { label: "Offsets", key: (o) => `${o.topic} ${o.partition}` }));
  }, list).stop;
}
