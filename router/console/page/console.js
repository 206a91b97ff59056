"use strict";
// Whatever comes from the router is put into the page as text, never as markup.
(() => {
  const RECONNECT_MS = 2000;
  const SVG = "http://www.w3.org/2000/svg";
  const byId = (id) => document.getElementById(id);
  const base = location.pathname.replace(/\/+$/, "");
  let credential = "";
  let following = null;

  // ---- pieces ------------------------------------------------------------------------------------------------------

  function element(tag, attributes, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) made.setAttribute(name, value);
    made.append(...children);
    return made;
  }

  function number(value, digits = 0) {
    if (!Number.isFinite(value)) return "–";
    return value.toLocaleString("en-US", { maximumFractionDigits: digits, minimumFractionDigits: digits });
  }

  function seconds(value) {
    if (value === null || value === undefined || !Number.isFinite(Number(value))) return "–";
    const s = Number(value);
    if (s < 0.01) return `${number(s * 1e3, 2)} ms`;
    if (s < 1) return `${number(s * 1e3, 1)} ms`;
    return `${number(s, 2)} s`;
  }

  function age(s) {
    if (s < 100) return `${Math.floor(s)} s`;
    if (s < 6000) return `${Math.floor(s / 60)} min`;
    if (s < 172800) return `${Math.floor(s / 3600)} h`;
    return `${Math.floor(s / 86400)} d`;
  }

  function bytes(value) {
    let left = Number(value);
    for (const unit of ["B", "kB", "MB", "GB"]) {
      if (left < 1000) return `${number(left, unit === "B" || left >= 100 ? 0 : 1)} ${unit}`;
      left /= 1000;
    }
    return `${number(left, 1)} TB`;
  }

  const percent = (part, whole) => (whole > 0 ? `${number((100 * part) / whole)} %` : "–");
  const spread = (latency) => (latency.count ? `${seconds(latency.p50_s)} / ${seconds(latency.p95_s)}` : "–");

  function sparkline(values, most) {
    const width = 120, height = 26;
    const top = Math.max(most || 0, ...values, 1e-9);
    const step = width / Math.max(1, values.length - 1);
    const points = values.map((v, i) => `${(i * step).toFixed(1)},${(height - 2 - (height - 4) * (v / top)).toFixed(1)}`);
    const svg = document.createElementNS(SVG, "svg");
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("preserveAspectRatio", "none");
    svg.setAttribute("aria-hidden", "true");
    if (points.length < 2) return svg;
    const area = document.createElementNS(SVG, "polygon");
    area.setAttribute("class", "area");
    area.setAttribute("points", `0,${height} ${points.join(" ")} ${width},${height}`);
    const line = document.createElementNS(SVG, "polyline");
    line.setAttribute("class", "stroke");
    line.setAttribute("points", points.join(" "));
    svg.append(area, line);
    return svg;
  }

  function tile(name, value, more, chart) {
    const shown = element("div", { class: "value" }, value);
    if (more) shown.append(" ", element("small", null, more));
    const made = element("div", { "data-tile": name }, element("div", { class: "name" }, name), shown);
    if (chart) made.append(chart);
    return made;
  }

  function bar(parts) {
    const made = element("span", { class: "bar" });
    for (const part of parts) {
      const piece = element("i");
      piece.style.width = `${(100 * Math.min(1, Math.max(0, part))).toFixed(2)}%`;
      made.append(piece);
    }
    return made;
  }

  function fillTable(table, columns, rows, attributes) {
    table.tHead.rows[0].replaceChildren(...columns.map((column) => element("th", column.left ? { class: "left" } : null, column.name)));
    table.tBodies[0].replaceChildren(
      ...rows.map((row) => {
        const cells = columns.map((column) => {
          const value = column.of(row);
          return element("td", { "data-name": column.name, ...(column.left ? { class: "left" } : {}) }, ...(Array.isArray(value) ? value : [value]));
        });
        return element("tr", attributes(row), ...cells);
      }),
    );
  }

  // ---- the router's streams ----------------------------------------------------------------------------------------

  function headers(more) {
    return credential ? { authorization: `Bearer ${credential}`, ...more } : { ...more };
  }

  class Refused extends Error {
    constructor(status, message) {
      super(message);
      this.status = status;
    }
  }

  // One parsed object for each server-sent event.
  async function* eventsOf(response) {
    const decoder = new TextDecoder();
    const reader = response.body.getReader();
    let text = "";
    try {
      for (;;) {
        const { done, value } = await reader.read();
        if (done) return;
        text += decoder.decode(value, { stream: true });
        for (let end; (end = text.indexOf("\n\n")) >= 0; text = text.slice(end + 2)) {
          const message = text.slice(0, end);
          if (message.startsWith("data: ")) yield JSON.parse(message.slice(6));
        }
      }
    } finally {
      reader.cancel().catch(() => {});
    }
  }

  async function open(path, options) {
    const response = await fetch(base + path, { cache: "no-store", credentials: "omit", ...options });
    if (response.ok) return response;
    let message = response.statusText;
    try {
      message = (await response.json()).error.message;
    } catch {
      // not one of the router's own answers
    }
    byId("credential").hidden = byId("credential").hidden && response.status !== 401;
    throw new Refused(response.status, String(message));
  }

  // ---- live view ---------------------------------------------------------------------------------------------------

  function showLink(state, text) {
    byId("link").dataset.state = state;
    byId("link").textContent = text;
  }

  async function follow() {
    following?.abort();
    const mine = (following = new AbortController());
    while (!mine.signal.aborted) {
      try {
        for await (const state of eventsOf(await open("/events", { headers: headers(), signal: mine.signal }))) {
          showLink("live", "live");
          showState(state);
        }
        showLink("waiting", "the router ended the stream; connecting");
      } catch (error) {
        if (mine.signal.aborted) return;
        if (error.status === 401 || error.status === 403) {
          showLink("lost", error.message);
          return; // until another key is given
        }
        showLink("lost", error instanceof Refused ? error.message : "no router answers; connecting");
      }
      await new Promise((resolve) => setTimeout(resolve, RECONNECT_MS));
    }
  }

  function showState(state) {
    const { router, history, workers } = state;
    byId("model").textContent = router.model;
    const alive = workers.filter((worker) => worker.condition !== "gone");
    const used = alive.reduce((sum, worker) => sum + worker.used_blocks, 0);
    const total = alive.reduce((sum, worker) => sum + worker.num_blocks, 0);
    byId("tiles").replaceChildren(
      tile("tokens out", number(router.tokens_per_s, 1), "per s", sparkline(history.tokens_per_s)),
      tile("requests", number(router.requests_per_s, 1), "per s", sparkline(history.requests_per_s)),
      tile("in flight", number(router.inflight), null, sparkline(history.inflight)),
      tile("queued", number(router.queued), router.queued ? `${number(router.queued_tokens)} tokens` : null, sparkline(history.queued)),
      tile("KV in use", percent(used, total), `${number(used)} of ${number(total)} blocks`, sparkline(history.kv_used, 1)),
      tile("TTFT", seconds(router.ttft.p50_s), `p95 ${seconds(router.ttft.p95_s)}`),
      tile("ITL", seconds(router.itl.p50_s), `p95 ${seconds(router.itl.p95_s)}`),
      tile("prompt tokens cached", percent(router.hits.reported_tokens, router.hits.prompt_tokens), `predicted ${percent(router.hits.predicted_tokens, router.hits.prompt_tokens)}`),
    );
    const counts = (map) => Object.entries(map).map(([name, count]) => `${name} ${number(count)}`).join(", ") || "none";
    byId("facts").textContent = [
      `up ${age(router.up_s)}`,
      `ended: ${counts(router.requests)}`,
      `refused: ${counts(router.refused)}`,
      `index: ${number(router.index_blocks)} blocks, ${bytes(router.index_bytes)}`,
      `event lag ${seconds(router.event_lag_s)}`,
      `directory answered ${seconds(router.directory_silence_s)} ago`,
    ].join(" · ");
    byId("window").textContent =
      `TTFT, ITL, cached tokens and transfers are of this router's answers of the last ${age(state.window_s)}; running and waiting are each worker's own word.`;
    fillTable(byId("workers"), WORKER_COLUMNS, workers, (worker) => ({
      "data-worker": worker.worker_id,
      "data-condition": worker.condition,
      class: worker.condition === "gone" ? "gone" : "",
    }));
  }

  const WORKER_COLUMNS = [
    { name: "worker", of: (w) => [w.worker_id, element("div", { class: "sub" }, w.address)] },
    { name: "role", left: true, of: (w) => element("span", { class: "role", "data-role": w.role }, w.role) },
    { name: "state", left: true, of: (w) => [
      element("span", { class: "pill", "data-state": w.condition }, w.condition),
      element("div", { class: "sub" }, w.gone_s === null ? `seen for ${age(w.seen_s)}${w.breaker === "closed" ? "" : `, breaker ${w.breaker}`}` : `for ${age(w.gone_s)}`),
    ] },
    { name: "KV blocks", left: true, of: (w) => [
      bar([w.used_blocks / w.num_blocks, w.cached_blocks / w.num_blocks]),
      `${number(w.used_blocks)} / ${number(w.num_blocks)}`,
      element("div", { class: "sub" }, `${number(w.cached_blocks)} cached`),
    ] },
    { name: "run / wait", of: (w) => `${number(w.running)} / ${number(w.waiting)}` },
    { name: "owed", of: (w) => [seconds(w.queue_s), element("div", { class: "sub" }, `${number(w.pending_prefill_tokens)} tokens`)] },
    { name: "prefill rate", of: (w) => (w.prefill_tokens_per_s ? `${number(w.prefill_tokens_per_s)} tok/s` : "–") },
    { name: "TTFT p50 / p95", of: (w) => spread(w.ttft) },
    { name: "ITL p50 / p95", of: (w) => spread(w.itl) },
    { name: "cached", of: (w) => [
      percent(w.hits.reported_tokens, w.hits.prompt_tokens),
      element("div", { class: "sub" }, `predicted ${percent(w.hits.predicted_tokens, w.hits.prompt_tokens)}`),
    ] },
    { name: "KV sent", of: (w) => moved(w.transfers.sent_bytes, w.transfers.sent_bytes_per_s, w.transfers.failures) },
    { name: "KV read", of: (w) => moved(w.transfers.received_bytes, w.transfers.received_bytes_per_s, 0) },
  ];

  function moved(total, rate, failures) {
    const failed = failures ? `, ${number(failures)} failed` : "";
    return [bytes(total), element("div", { class: "sub" }, `${bytes(rate)}/s${failed}`)];
  }

  // ---- playground --------------------------------------------------------------------------------------------------

  let asking = null;

  function question() {
    const whole = (id) => (byId(id).value === "" ? null : Math.trunc(Number(byId(id).value)));
    const chat = byId("mode").value === "chat";
    return {
      mode: byId("mode").value,
      prompt: byId("prompt").value,
      system: chat ? byId("system").value : "",
      max_tokens: whole("max-tokens"),
      temperature: Number(byId("temperature").value || 0),
      seed: whole("seed"),
      regex: byId("regex").value,
    };
  }

  async function ask() {
    asking?.abort();
    const mine = (asking = new AbortController());
    setAsking(true);
    byId("answer").textContent = "";
    byId("ask-error").hidden = true;
    byId("trace").hidden = true;
    byId("ask-state").textContent = "waiting for the first token";
    try {
      const response = await open("/generate", {
        method: "POST",
        headers: headers({ "content-type": "application/json" }),
        body: JSON.stringify(question()),
        signal: mine.signal,
      });
      await receive(response);
    } catch (error) {
      if (!mine.signal.aborted) showAskError(error.message);
      byId("ask-state").textContent = mine.signal.aborted ? "stopped" : "";
    } finally {
      if (asking === mine) setAsking(false);
    }
  }

  async function receive(response) {
    let plan = null, tokens = 0;
    for await (const event of eventsOf(response)) {
      if (event.kind === "plan") plan = event.plan;
      if (event.kind === "text") {
        tokens += event.tokens;
        byId("answer").append(event.text);
        byId("ask-state").textContent = `${tokens} tokens in ${seconds(event.at_s)}`;
      }
      if (event.kind === "error") throw new Error(event.message);
      if (event.kind === "end") {
        byId("ask-state").textContent = `${event.finish_reason}: ${event.completion_tokens} tokens in ${seconds(event.total_s)}`;
        showTrace(event, plan);
        return;
      }
    }
    throw new Error("the answer broke off");
  }

  function setAsking(on) {
    byId("send").disabled = on;
    byId("stop").disabled = !on;
  }

  function showAskError(message) {
    byId("ask-error").textContent = message;
    byId("ask-error").hidden = false;
  }

  function showTrace(end, plan) {
    const report = end.report;
    showPath(end, plan);
    byId("numbers").replaceChildren(
      tile("prompt", number(end.prompt_tokens), "tokens"),
      tile("found cached", number(report.cached_tokens), "tokens"),
      tile("predicted cached", number(plan ? plan.prediction.cached_tokens : NaN), "tokens"),
      tile("predicted fetch", number(plan ? plan.prediction.fetched_tokens : NaN), "tokens"),
      tile("computed", number(report.prefill_tokens), "tokens"),
      tile("moved", number(report.blocks_moved), `blocks, ${bytes(report.bytes_moved)}`),
      tile("TTFT", seconds(end.ttft_s), plan ? `predicted ${seconds(plan.prediction.time_to_first_token_s)}` : null),
      tile("ITL", report.decode_tokens ? seconds(report.decode_s / report.decode_tokens) : "–", plan ? `predicted ${seconds(plan.prediction.inter_token_s)}` : null),
      tile("batch", number(report.mean_batch, 1), "sequences, mean"),
    );
    showWaterfall(end);
    if (plan) {
      byId("reason").textContent = plan.reason;
      showCandidates(byId("prefill-candidates"), "prefill, decoded by the chosen worker", plan.prefill_candidates, plan.prefill_workers[0]);
      showCandidates(byId("decode-candidates"), "decode, prefilled as chosen", plan.decode_candidates, plan.decode_worker);
    }
    byId("trace").hidden = false;
  }

  function showPath(end, plan) {
    const report = end.report;
    const stop = (role, name, note) => element("div", { class: "stop", "data-role": role }, element("b", null, name), element("span", { class: "muted" }, note));
    const hop = (text) => element("div", { class: "hop" }, text ? element("div", null, text) : "", "⟶");
    const again = [
      end.dispatches > 1 ? `sent ${end.dispatches} times` : "",
      report.failed_attempts ? `${report.failed_attempts} hand-offs failed` : "",
    ].filter(Boolean).join(", ");
    const stops = [stop("", "router", again || (plan ? `${plan.prefill_candidates.length + plan.decode_candidates.length} candidates` : ""))];
    if (report.prefill_worker) {
      stops.push(hop(""), stop("prefill", report.prefill_worker, "prefill"));
      stops.push(hop(`${number(report.blocks_moved)} blocks over ${report.transport || "nothing"}`), stop("decode", end.decode_worker, "decode"));
    } else {
      stops.push(hop(""), stop("both", end.decode_worker, "prefill and decode"));
    }
    byId("path").replaceChildren(...stops);
  }

  const KINDS = { "admission and routing": "wait", "queue of the worker": "wait", prefill: "prefill", "first token on its way": "wait", decode: "decode" };

  function showWaterfall(end) {
    const lane = (name, kind, from, until, shown, title) => {
      const piece = element("i", { "data-kind": kind });
      piece.style.left = `${((100 * from) / end.total_s).toFixed(3)}%`;
      piece.style.width = `${((100 * Math.max(0, Math.min(until, end.total_s) - from)) / end.total_s).toFixed(3)}%`;
      return element("div", { class: "phase", title, "data-phase": name }, element("span", null, name), element("div", { class: "lane" }, piece), element("span", { class: "time" }, shown));
    };
    const lanes = end.phases.map((p) => lane(p.name, KINDS[p.name], p.start_s, p.end_s, seconds(p.end_s - p.start_s), ""));
    const reads = Number(end.report.transfer_s);
    if (reads > 0) {
      const prefill = end.phases.find((phase) => phase.name === "prefill");
      const from = prefill ? prefill.start_s : 0;
      const title = "The sum over READs, which run while later chunks are computed. When each ran is not known: drawn from the start of the prefill.";
      lanes.splice(-1, 0, lane("KV reads (sum)", "reads", from, from + reads, seconds(reads), title));
    }
    byId("waterfall").replaceChildren(...lanes);
  }

  const CANDIDATE_COLUMNS = [
    { name: "worker", of: (c) => c.worker },
    { name: "queue", of: (c) => seconds(c.queue_s) },
    { name: "prefill", of: (c) => seconds(c.prefill_s) },
    { name: "fetch", of: (c) => seconds(c.fetch_s) },
    { name: "TTFT", of: (c) => seconds(c.time_to_first_token_s) },
    { name: "transfer", of: (c) => seconds(c.transfer_s) },
    { name: "exposed", of: (c) => seconds(c.exposed_transfer_s) },
    { name: "ITL", of: (c) => seconds(c.inter_token_s) },
    { name: "cached", of: (c) => number(c.cached_tokens) },
    { name: "fetched", of: (c) => number(c.fetched_tokens) },
  ];

  function showCandidates(table, title, candidates, chosen) {
    table.caption.textContent = `${title} (predicted)`;
    table.hidden = !candidates.length;
    fillTable(table, CANDIDATE_COLUMNS, candidates, (c) => ({ class: c.worker === chosen ? "chosen" : "" }));
  }

  // ---- start -------------------------------------------------------------------------------------------------------

  byId("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    ask();
  });
  byId("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("ask").requestSubmit(byId("send"));
  });
  byId("stop").addEventListener("click", () => asking?.abort());
  byId("mode").addEventListener("change", () => {
    byId("system-label").hidden = byId("mode").value !== "chat";
  });
  byId("credential").addEventListener("submit", (event) => {
    event.preventDefault();
    credential = byId("key").value.trim();
    follow();
  });
  follow();
})();
