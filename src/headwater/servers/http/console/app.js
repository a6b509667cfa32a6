// The console's frame: which page is shown, who is signed in, light or dark.

import { get, listen, post, Problem, remove } from "./api.js";
import { complain, h, note, said, show } from "./ui.js";
import { overview } from "./pages/overview.js";
import { topic, topics } from "./pages/topics.js";
import { events } from "./pages/events.js";
import { group, groups } from "./pages/groups.js";
import { subscriptions } from "./pages/subscriptions.js";
import { store, stores } from "./pages/stores.js";
import { pipeline, pipelines } from "./pages/pipelines.js";
import { kafkaGroup, kafkaGroups } from "./pages/kafka.js";
import { webhook, webhooks } from "./pages/webhooks.js";
import { accounts } from "./pages/accounts.js";

const NAV = [
  ["/", "Overview"],
  ["/topics", "Topics"],
  ["/events", "Events"],
  ["/groups", "Groups"],
  ["/subscriptions", "Subscriptions"],
  ["/stores", "Event stores"],
  ["/pipelines", "Pipelines"],
  ["/kafka", "Kafka groups"],
  ["/webhooks", "Webhooks"],
  ["/accounts", "Accounts"],
];

// A page gets the parts of its address, and answers with what to do when it is left.
const PAGES = [
  [/^\/$/, overview],
  [/^\/topics$/, topics],
  [/^\/topics\/([^/]+)$/, topic],
  [/^\/events$/, events],
  [/^\/groups$/, groups],
  [/^\/groups\/([^/]+)$/, group],
  [/^\/subscriptions$/, subscriptions],
  [/^\/stores$/, stores],
  [/^\/stores\/([^/]+)$/, store],
  [/^\/pipelines$/, pipelines],
  [/^\/pipelines\/([^/]+)$/, pipeline],
  [/^\/kafka$/, kafkaGroups],
  [/^\/kafka\/([^/]+)$/, kafkaGroup],
  [/^\/webhooks$/, webhooks],
  [/^\/webhooks\/([^/]+)$/, webhook],
  [/^\/accounts$/, accounts],
];

let leave = null;
let shown = 0;

async function route() {
  const [place, search = ""] = (location.hash.slice(1) || "/").split("?");
  for (const link of document.querySelectorAll("#nav a")) {
    const own = link.getAttribute("href").slice(1);
    const here = own === "/" ? place === "/" : place === own || place.startsWith(`${own}/`);
    if (here) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
    // On a small screen the others stand beside it, out of sight.
    const nav = link.parentElement;
    if (here) nav.scrollLeft = link.offsetLeft - nav.offsetLeft - (nav.clientWidth - link.offsetWidth) / 2;
  }
  leave?.();
  leave = null;
  const turn = ++shown;
  const [match, page] = PAGES.map(([pattern, page]) => [pattern.exec(place), page]).find(([found]) => found) ?? [];
  if (!match) {
    show(h("p.empty", "There is no such page. ", h("a", { href: "#/" }, "To the overview")));
    return;
  }
  try {
    const left = await page(...match.slice(1).map(decodeURIComponent), new URLSearchParams(search));
    // Somebody may have gone on while this page was still loading.
    if (turn === shown) leave = left ?? null;
    else left?.();
  } catch (error) {
    if (turn === shown && error.status !== 401) wrong(error, route);
  }
}

function wrong(error, again) {
  if (!(error instanceof Problem)) console.error(error);
  show(h("div.card.stack", said(error), h("button.second", { type: "button", onclick: again }, "Try again")));
}

function login() {
  leave?.();
  leave = null;
  document.title = "Sign in · Headwater";
  const wrong = h("div");
  const name = h("input", { name: "name", autocomplete: "username", required: true });
  const password = h("input", { name: "password", type: "password", autocomplete: "current-password", required: true });
  const form = h("form", h("h1", "Sign in"), h("label", "Account", name), h("label", "Password", password), wrong, h("button", { type: "submit" }, "Sign in"));
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    try {
      await post("/v1/sessions", { name: name.value, password: password.value }, { quiet: true });
      await start();
    } catch (error) {
      wrong.replaceChildren(h("p.bad", { role: "alert" }, error.message));
    }
  });
  show(h("section.card.login", form));
  name.focus();
}

async function start() {
  const me = await get("/v1/me");
  document.querySelector("#who").textContent = me.account ?? "";
  document.querySelector("#leave").hidden = !me.account;
  await route();
}

document.querySelector("#nav").append(...NAV.map(([place, name]) => h("a", { href: `#${place}` }, name)));
document.querySelector("#leave").addEventListener("click", async () => {
  try {
    await remove("/v1/sessions");
    document.querySelector("#who").textContent = "";
    document.querySelector("#leave").hidden = true;
    login();
    note("Signed out.");
  } catch (error) {
    complain(error);
  }
});

const theme = localStorage.getItem("theme");
if (theme) document.documentElement.dataset.theme = theme;
document.querySelector("#theme").addEventListener("click", () => {
  const dark = document.documentElement.dataset.theme
    ? document.documentElement.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = dark ? "light" : "dark";
  localStorage.setItem("theme", document.documentElement.dataset.theme);
});

document.querySelector(".skip").addEventListener("click", (event) => {
  // The address says which page is shown, so the link may not change it.
  event.preventDefault();
  document.querySelector("#main").focus();
});

listen({
  shutOut: login,
  reachable: (well) => {
    const bar = document.querySelector("#offline");
    bar.hidden = well;
    bar.textContent = well ? "" : "The server cannot be reached; trying again.";
  },
});
addEventListener("hashchange", () => {
  route();
  document.querySelector("#main").focus({ preventScroll: true });
  scrollTo(0, 0);
});
start().catch((error) => {
  if (error.status !== 401) wrong(error, () => location.reload());
});
