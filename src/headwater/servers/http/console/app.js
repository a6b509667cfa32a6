// The frame of the console: routing, sign-in, theme.

import { get, listen, post, Problem, remove } from "./api.js";
import { errorText, h, note, noteError, show } from "./ui.js";
import { overview } from "./pages/overview.js";
import { topic, topics } from "./pages/topics.js";
import { events } from "./pages/events.js";
import { queue, queues } from "./pages/queues.js";
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
  ["/queues", "Queues"],
  ["/subscriptions", "Subscriptions"],
  ["/stores", "Event stores"],
  ["/pipelines", "Pipelines"],
  ["/kafka", "Kafka groups"],
  ["/webhooks", "Webhooks"],
  ["/accounts", "Accounts"],
];

// A page gets the parts of its path and returns a function that is called when the user leaves it.
const PAGES = [
  [/^\/$/, overview],
  [/^\/topics$/, topics],
  [/^\/topics\/([^/]+)$/, topic],
  [/^\/events$/, events],
  [/^\/queues$/, queues],
  [/^\/queues\/([^/]+)$/, queue],
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
  const [current, search = ""] = (location.hash.slice(1) || "/").split("?");
  for (const link of document.querySelectorAll("#nav a")) {
    const own = link.getAttribute("href").slice(1);
    const isCurrent = own === "/" ? current === "/" : current === own || current.startsWith(`${own}/`);
    if (isCurrent) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
    // On a small screen the navigation scrolls: keep the current link visible.
    const nav = link.parentElement;
    if (isCurrent) nav.scrollLeft = link.offsetLeft - nav.offsetLeft - (nav.clientWidth - link.offsetWidth) / 2;
  }
  leave?.();
  leave = null;
  const turn = ++shown;
  const [match, page] = PAGES.map(([pattern, page]) => [pattern.exec(current), page]).find(([found]) => found) ?? [];
  if (!match) {
    show(h("p.empty", "Page not found. ", h("a", { href: "#/" }, "Go to the overview")));
    return;
  }
  try {
    const left = await page(...match.slice(1).map(decodeURIComponent), new URLSearchParams(search));
    // The user may have left while this page was still loading.
    if (turn === shown) leave = left ?? null;
    else left?.();
  } catch (error) {
    if (turn === shown && error.status !== 401) showError(error, route);
  }
}

function showError(error, retry) {
  if (!(error instanceof Problem)) console.error(error);
  show(h("div.card.stack", errorText(error), h("button.second", { type: "button", onclick: retry }, "Retry")));
}

function login() {
  leave?.();
  leave = null;
  document.title = "Sign in · Headwater";
  const problem = h("div");
  const name = h("input", { name: "name", autocomplete: "username", required: true });
  const password = h("input", { name: "password", type: "password", autocomplete: "current-password", required: true });
  const form = h("form", h("h1", "Sign in"), h("label", "Account", name), h("label", "Password", password), problem, h("button", { type: "submit" }, "Sign in"));
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    try {
      await post("/v1/sessions", { name: name.value, password: password.value }, { quiet: true });
      await start();
    } catch (error) {
      problem.replaceChildren(h("p.bad", { role: "alert" }, error.message));
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

document.querySelector("#nav").append(...NAV.map(([path, name]) => h("a", { href: `#${path}` }, name)));
document.querySelector("#leave").addEventListener("click", async () => {
  try {
    await remove("/v1/sessions");
    document.querySelector("#who").textContent = "";
    document.querySelector("#leave").hidden = true;
    login();
    note("Signed out.");
  } catch (error) {
    noteError(error);
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
  // The fragment selects the page, so the link must not change it.
  event.preventDefault();
  document.querySelector("#main").focus();
});

listen({
  signedOut: login,
  reachable: (isReachable) => {
    const bar = document.querySelector("#offline");
    bar.hidden = isReachable;
    bar.textContent = isReachable ? "" : "The server cannot be reached. Retrying…";
  },
});
addEventListener("hashchange", () => {
  route();
  document.querySelector("#main").focus({ preventScroll: true });
  scrollTo(0, 0);
});
start().catch((error) => {
  if (error.status !== 401) showError(error, () => location.reload());
});
