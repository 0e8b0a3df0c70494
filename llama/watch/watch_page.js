"use strict";
(() => {
  const $ = (id) => document.getElementById(id);
  const data = JSON.parse($("recording").textContent);
  const total = data.texts[0].length;
  const last = data.steps.length;
  const MOST_SHOWN = 300; // tokens of a long text
  let step = 1;
  let timer = null;

  const element = (tag, className, text) => {
    const made = document.createElement(tag);
    if (className) made.className = className;
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const seenBy = (moment, layer) => moment.seen[moment.seen.length === 1 ? 0 : layer];
  const within = (ranges, position) => ranges.some(([first, end]) => first <= position && position < end);
  const count = (ranges) => ranges.reduce((sum, [first, end]) => sum + end - first, 0);

  // The state of a position in this step: with the cache in one layer, in any layer, and without the cache.
  function stateOn(moment, position, layer) {
    const [start, fed] = moment.fed[0];
    if (position >= start + fed) {
      if (position < start + fed + moment.rejected.length) return "rejected";
      return position < data.layout.reserved ? "reserved" : "";
    }
    if (!within(seenBy(moment, layer), position)) return "gone";
    return position >= start ? "written" : "cached";
  }
  function stateOnOfAny(moment, position) {
    const states = moment.seen.map((_, layer) => stateOn(moment, position, layer));
    return states.find((state) => state !== "gone") ?? "gone";
  }
  function stateOff(moment, position, before) {
    const [start, fed] = moment.fed[1];
    if (position >= start + fed) return "";
    return position < before ? "recomputed" : "written";
  }
  const fedBefore = () => (step > 1 ? data.steps[step - 2].fed[1][0] + data.steps[step - 2].fed[1][1] : 0);

  // ---- pictures ------------------------------------------------------------------------------------------------

  function surface(canvas, height) {
    const width = canvas.clientWidth || canvas.parentElement.clientWidth;
    const ratio = window.devicePixelRatio || 1;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.height = `${height}px`;
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.clearRect(0, 0, width, height);
    return [pen, width];
  }

  function hatched(pen) {
    const tile = document.createElement("canvas");
    tile.width = tile.height = 6;
    const brush = tile.getContext("2d");
    brush.fillStyle = colour("recomputed");
    brush.fillRect(0, 0, 6, 6);
    brush.strokeStyle = colour("paper");
    brush.lineWidth = 1.2;
    brush.beginPath();
    for (const shift of [-6, 0, 6]) {
      brush.moveTo(shift, 6);
      brush.lineTo(shift + 6, 0);
    }
    brush.stroke();
    return pen.createPattern(tile, "repeat");
  }

  function drawGrid(canvas, stateOf, bitsOf) {
    const rows = data.layers;
    const height = Math.max(3, Math.min(16, (window.innerWidth < 600 ? 132 : 210) / rows));
    const [pen, width] = surface(canvas, Math.ceil(height * rows) + 9);
    const cell = width / total;
    const gap = cell > 5 && height > 4 ? 1 : cell > 3 ? 0.5 : 0;
    const paint = { cached: colour("cache"), written: colour("written"), recomputed: hatched(pen), reserved: colour("field") };
    const drawRun = (layer, first, end, state) => {
      const y = layer * height;
      for (let position = first; position < end; position = gap ? position + 1 : end) {
        const x = position * cell;
        const wide = Math.max((gap ? cell : (end - first) * cell) - gap, 1);
        const tall = (height - gap) * bitsOf(position, state);
        if (state === "gone" || state === "rejected") {
          pen.strokeStyle = colour(state === "gone" ? "grid" : "written");
          pen.strokeRect(x + 0.5, y + 0.5, Math.max(wide - 1, 0.5), height - gap - 1);
          continue;
        }
        if (tall < height - gap) {
          pen.fillStyle = paint.reserved;
          pen.fillRect(x, y, wide, height - gap);
        }
        pen.fillStyle = paint[state];
        pen.fillRect(x, y + height - gap - tall, wide, tall);
        if (state === "written" && cell > 5) {
          pen.fillStyle = colour("paper");
          pen.fillRect(x + wide / 2 - 1, y + (height - gap) / 2 - 1, 2, 2);
        }
      }
    };
    for (let layer = 0; layer < rows; layer++) {
      let first = 0;
      let state = stateOf(0, layer);
      for (let position = 1; position <= total; position++) {
        const other = position < total ? stateOf(position, layer) : null;
        const same = other === state && (state === null || bitsOf(position, state) === bitsOf(first, state));
        if (same) continue;
        if (state) drawRun(layer, first, position, state);
        first = position;
        state = other;
      }
    }
    const below = height * rows + 2;
    pen.fillStyle = colour("muted");
    pen.fillRect(0, below, data.prompt * cell - gap, 2); // under the prompt
    const middle = (data.steps[step - 1].fed[1][1] - 0.5) * cell - gap / 2; // and an arrow under the newest token
    pen.fillStyle = paint.written;
    pen.beginPath();
    pen.moveTo(middle - 5, below + 6);
    pen.lineTo(middle, below - 1);
    pen.lineTo(middle + 5, below + 6);
    pen.fill();
    return [pen, cell, height * rows];
  }

  function drawBlocks(pen, cell, height, end) {
    const { block } = data.layout;
    pen.strokeStyle = colour("cache");
    pen.lineWidth = 2;
    for (let first = 0; block && first < end; first += block) {
      pen.strokeRect(first * cell + 1, 1, Math.min(block, total - first) * cell - 2, height - 2);
    }
  }

  function drawGrids(moment) {
    const { bits, group } = data.layout;
    const end = moment.fed[0][0] + moment.fed[0][1];
    const newest = group ? Math.floor((end - 1 - data.layout.window) / group) * group : 0;
    const share = (position, state) => (bits && state !== "reserved" && position < newest ? bits / data.bits : 1);
    const [pen, cell, height] = drawGrid($("grid-on"), (p, layer) => stateOn(moment, p, layer), share);
    drawBlocks(pen, cell, height, end);
    const before = fedBefore();
    drawGrid($("grid-off"), (p) => stateOff(moment, p, before), () => 1);
    const fed = moment.fed[0][1];
    const held = count(seenBy(moment, 0));
    const many = `Grid of ${data.layers} layers and ${total} positions.`;
    $("grid-on").setAttribute("aria-label",
      `${many} In the cache: ${Math.max(held - fed, 0)} positions are read, ${fed} are computed and written, ` +
      `${end - held} are dropped${moment.rejected.length ? `, ${moment.rejected.length} guesses are rejected` : ""}.`);
    $("grid-off").setAttribute("aria-label",
      `${many} Without the cache: ${before} positions are computed again, ${moment.fed[1][1] - before} for the first time.`);
  }

  // ---- who attends to whom --------------------------------------------------------------------------------------

  const triangle = (rows) => (rows * (rows + 1)) / 2;

  // `stateOf`: of a row, which is a position; `keysOf`: the ranges of the keys that it reads.
  function drawTriangle(canvas, stateOf, keysOf) {
    const [pen, width] = surface(canvas, canvas.clientWidth);
    const cell = width / total;
    const gap = cell > 3 ? 1 : 0;
    const paint = { written: colour("written"), recomputed: hatched(pen), kept: colour("cache"), "": colour("grid") };
    const fill = (state, row, [first, end]) => {
      pen.globalAlpha = state === "kept" ? 0.4 : 1;
      pen.fillStyle = paint[state];
      const wide = gap ? 1 : end - first;
      for (let key = first; key < end; key += wide) {
        pen.fillRect(key * cell, row * cell, wide * cell - gap, cell - gap);
      }
    };
    for (let row = 0; row < total; row++) {
      const state = stateOf(row);
      fill("", row, [0, row + 1]);
      if (state === "rejected") {
        pen.strokeStyle = paint.written;
        pen.strokeRect(0.5, row * cell + 0.5, (row + 1) * cell - gap - 1, cell - gap - 1);
      } else if (state) {
        keysOf(row).forEach((range) => fill(state, row, range));
      }
    }
  }

  function showTriangles(moment) {
    const [start, fed] = moment.fed[0];
    const end = start + fed;
    const before = fedBefore();
    const rejected = moment.rejected.length;
    const stateOf = (row) => (row < start ? "kept" : row < end ? "written" : row < end + rejected ? "rejected" : "");
    drawTriangle($("pairs-on"), stateOf, (row) => data.rows[row]);
    drawTriangle($("pairs-off"), (row) => stateOff(moment, row, before), (row) => [[0, row + 1]]);
    const on = count(data.rows.slice(start, end).flat()) + triangle(end + rejected) - triangle(end);
    let off = 0; // a guess saves several steps
    for (let rows = before ? before + 1 : end; rows <= end; rows++) off += triangle(rows);
    const again = off - (triangle(end) - triangle(before));
    const many = (number, what) => `${number.toLocaleString("en")} ${what}${number === 1 ? "" : "s"}`;
    const kept = start ? ` Computed earlier: ${many(start, "pale row")}.` : "";
    const words = {
      on: `computes ${many(fed + rejected, "row")}: ${many(on, "pair")}.${kept}`,
      off: `computes ${many(end, "row")}: ${many(off, "pair")}, ${again.toLocaleString("en")} of them again.`,
    };
    for (const side of ["on", "off"]) {
      $(`pairs-words-${side}`).textContent = `Step ${step} ${words[side]}`;
      $(`pairs-${side}`).setAttribute("aria-label",
        `Triangle of queries and keys. ${side === "on" ? "With" : "Without"} the cache, step ${step} ${words[side]}`);
    }
  }

  // ---- the parts of the page -----------------------------------------------------------------------------------

  function showText(target, texts, end, stateOf) {
    const from = Math.max(0, end - MOST_SHOWN);
    const parts = from ? [element("span", "", `(${from} tokens before) `)] : [];
    for (let position = from; position < end; position++) {
      parts.push(element("span", stateOf(position), texts[position] || "·"));
    }
    target.replaceChildren(...parts);
    target.scrollTop = target.scrollHeight;
  }

  function showTexts(moment) {
    const before = fedBefore();
    const end = moment.fed[1][0] + moment.fed[1][1];
    showText($("text-on"), data.texts[0], end, (position) => stateOnOfAny(moment, position));
    $("text-on").append(...moment.rejected.map((text) => element("span", "rejected", text || "·")));
    $("text-on").scrollTop = $("text-on").scrollHeight;
    showText($("text-off"), data.texts[1], end, (position) => stateOff(moment, position, before));
  }

  // Reserve the height of the whole text, so that nothing below moves when it grows.
  function reserveText() {
    for (const [side, texts] of [["on", data.texts[0]], ["off", data.texts[1]]]) {
      const target = $(`text-${side}`);
      target.style.minHeight = "0";
      showText(target, texts, data.steps[last - 1].fed[1][1], () => "written");
      target.style.minHeight = `${target.offsetHeight}px`;
    }
  }

  function tally(target, figure, words) {
    target.replaceChildren(element("b", "", figure), document.createTextNode(` ${words}`));
  }

  function makeCounters() {
    const made = data.counters.map((name, place) => {
      const line = element("details");
      line.id = `counter-${place}`;
      const summary = element("summary");
      const formula = element("div", "formula");
      summary.append(element("span", "name", name));
      for (const side of ["on", "off"]) {
        const value = element("span", `value ${side}`);
        const bar = element("span", "bar");
        bar.append(element("i"));
        value.append(element("b"), document.createTextNode(" "), element("small"), bar);
        summary.append(value);
        const words = element("p", side);
        words.append(element("b", "", side === "on" ? "With: " : "Without: "), element("span"));
        formula.append(words);
      }
      line.append(summary, formula);
      return line;
    });
    made.splice(4, 0, element("p", "meaning")); // below the two lines with bytes
    $("counters").replaceChildren(...made);
  }

  function showCounters(moment) {
    data.counters.forEach((name, place) => {
      const line = $(`counter-${place}`);
      ["on", "off"].forEach((side, which) => {
        const [value, soFar, figure, formula] = moment.counters[which][place];
        const shown = line.querySelector(`.value.${side}`);
        shown.querySelector("b").textContent = value;
        shown.querySelector("small").textContent = place === 3 ? "" : `${soFar} so far`;
        shown.querySelector("i").style.width = `${(100 * figure) / (data.most[place] || 1)}%`;
        line.querySelector(`.formula .${side} span`).textContent = formula;
      });
    });
    document.querySelector(".meaning").textContent = moment.bytes;
  }

  function bars(target, rows) {
    target.replaceChildren(...rows.map(([text, share, words, chosen]) => {
      const line = element("li", chosen ? "chosen" : "");
      const bar = element("span", "bar");
      const fill = element("i");
      fill.style.width = `${100 * share}%`;
      bar.append(fill);
      bar.setAttribute("aria-hidden", "true");
      line.append(element("code", "", text), bar, element("span", "", words));
      return line;
    }));
  }

  const percent = (share) => `${(100 * share).toFixed(share < 0.0995 ? 1 : 0)} %`;

  function showLikely(moment) {
    bars($("likely"), moment.likely.map(([text, share, chosen]) =>
      [text || "·", share, `${chosen ? "✓ " : ""}${percent(share)}`, chosen]));
  }

  // The positions and weights of the chosen layer and head, or of the mean of its heads. A head may lack a key: level 0.
  function attention(moment) {
    if (moment.attention === null) return null;
    const raw = Uint8Array.from(atob(moment.attention), (letter) => letter.charCodeAt(0));
    const chosen = Number($("layer").value);
    let offset = 0;
    for (const layer of data.attended) {
      const ranges = seenBy(moment, layer);
      const size = count(ranges);
      if (layer === chosen) {
        const positions = ranges.flatMap(([first, end]) => Array.from({ length: end - first }, (_, i) => first + i));
        const head = $("head").value;
        const heads = head === "mean" ? [...Array(data.heads).keys()] : [Number(head)];
        const levels = (i) => heads.map((h) => raw[offset + h * size + i]).filter((level) => level > 0);
        const weight = (own) => own.reduce((sum, level) => sum + level - 1, 0) / heads.length / 254;
        return positions.map((position, i) => [position, weight(levels(i)), levels(i).length])
          .filter(([, , held]) => held > 0);
      }
      offset += data.heads * size;
    }
    return null;
  }

  function showAttention(moment) {
    const looks = attention(moment);
    const height = 96;
    const [pen, width] = surface($("attention"), height);
    const cell = width / total;
    pen.fillStyle = colour("grid");
    pen.fillRect(0, height - 1, width, 1);
    if (looks === null) {
      $("attention").setAttribute("aria-label", "This page has no attention weights of this step.");
      $("scale").textContent = "left out for this step";
      $("looks").replaceChildren();
      return;
    }
    const most = Math.max(...looks.map(([, weight]) => weight), 0.01);
    pen.fillStyle = colour("attention");
    for (const [position, weight] of looks) {
      const tall = ((height - 5) * weight) / most;
      pen.fillRect(position * cell, height - 4 - tall, Math.max(cell - (cell > 3 ? 1 : 0), 1), tall);
    }
    pen.fillStyle = colour("cache"); // a strip below: the positions whose keys are stored
    for (const [position] of looks) pen.fillRect(position * cell, height - 3, Math.max(cell, 1), 2);
    const first = [...looks].sort((a, b) => b[1] - a[1]).slice(0, 5);
    $("scale").textContent = `highest: ${percent(most)}; ${looks.length} keys of ${total} positions are read`;
    const words = first.map(([position, weight]) => `position ${position} ${data.texts[0][position]} ${percent(weight)}`);
    $("attention").setAttribute("aria-label", `Attention over ${looks.length} positions; most of it: ${words.join(", ")}.`);
    bars($("looks"), first.map(([position, weight]) =>
      [`${position} ${data.texts[0][position] || "·"}`, weight, percent(weight), false]));
  }

  // ---- questions and mistakes -----------------------------------------------------------------------------------

  function picks(name, texts) {
    return texts.map((text, place) => {
      const label = element("label", "pick");
      const input = element("input");
      Object.assign(input, { type: "radio", name, value: place });
      label.append(input, element("span", "", text));
      return label;
    });
  }

  function makeQuestions() {
    $("predict").hidden = !data.questions.length;
    const parts = [["li"], ["fieldset"], ["div", "choices"], ["button", "", "Show the answer"], ["p", "why"]];
    $("questions").replaceChildren(...data.questions.map((question, place) => {
      const [line, field, choices, button, why] = parts.map((part) => element(...part));
      Object.assign(button, { type: "button", disabled: true });
      why.setAttribute("role", "status");
      choices.append(...picks(`question-${place}`, question.choices));
      field.append(element("legend", "", `${place + 1}. ${question.words}`), choices);
      field.addEventListener("change", () => { button.disabled = false; });
      button.addEventListener("click", () => {
        const right = Number(field.querySelector(":checked").value) === question.answer;
        const words = `${right ? "✓ Yes" : "✗ No"}: ${question.choices[question.answer]}.`;
        why.replaceChildren(element("b", "", words), ` ${question.why}`);
      });
      line.append(field, button, why);
      return line;
    }));
  }

  const { made, calls, runs } = data.broken;
  const given = calls[calls.length - 1]; // tokens of the prompt of the runs with mistakes
  let mistake = 0;

  // A bar for each position: the KL divergence, on a logarithmic scale from 0.001 to 10 or more.
  function drawSymptom(canvas, run, height, left) {
    const [pen, width] = surface(canvas, height);
    const bottom = height - 5;
    const cell = (width - left) / run.kl.length;
    const tall = (kl) => (bottom - 6) * Math.min(1, Math.max(0, (Math.log10(kl) + 3) / 4));
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    for (const line of left ? [0.001, 0.01, 0.1, 1, 10] : [0.001]) {
      pen.fillStyle = colour("grid");
      pen.fillRect(left, Math.round(bottom - tall(line)), width - left, 1);
      pen.fillStyle = colour("muted");
      if (left) pen.fillText(line, 0, bottom - tall(line));
    }
    run.kl.forEach((kl, position) => {
      const wrong = run.wrong[position] === "1";
      const high = Math.max(tall(kl), wrong ? 2 : 0);
      pen.fillStyle = colour(wrong ? "alarm" : "muted");
      pen.fillRect(left + position * cell, bottom - high, wrong ? Math.max(cell - 1.5, 1) : 0.4 * cell, high);
    });
    pen.fillStyle = colour("muted");
    [0, ...calls].slice(0, -1).forEach((first, call) => { // a line under each call of the prompt
      pen.fillRect(left + first * cell, bottom + 2, (calls[call] - first) * cell - 2, 2);
    });
  }

  function mistakeWords(run) {
    const most = run.kl.length - given + 1; // new tokens
    const first = run.wrong.indexOf("1", given - 1) - given + 2;
    const wrong = run.wrong.slice(given - 1).split("1").length - 1;
    if (first < 1) return `${run.title}. All ${most} new tokens are right. KL is at most ${Math.max(...run.kl)}: rounding.`;
    const right = first > 2 ? `first ${first - 1} new tokens are` : "first new token is";
    const late = first > 1 ? `The ${right} right: a shorter text would not show the mistake. ` : "";
    return `${run.title}. ${late}New token ${first} is wrong. If the right text is fed all the same, ${wrong} of ${most} ` +
      `next tokens are wrong (${percent(wrong / most)}).`;
  }

  function makeMistakes() {
    $("made").textContent = `Recorded with ${made.model}, ${made.dtype}, not with the run above: ${made.command}, ` +
      `commit ${made.commit}. The prompt is fed in ${calls.length} calls, then one token a call.`;
    const labels = picks("mistake", runs.map((run) => run.title));
    labels.forEach((label, place) => {
      const spark = element("canvas");
      spark.setAttribute("aria-hidden", "true");
      label.append(spark);
      label.addEventListener("change", () => showMistake(place));
    });
    labels[0].querySelector("input").checked = true;
    $("mistakes").append(...labels);
    $("calls").textContent = `▬ the prompt: ${given} tokens`;
  }

  function showMistake(place = mistake) {
    mistake = place;
    const run = runs[mistake];
    const right = runs[0].text;
    document.querySelectorAll("#mistakes canvas").forEach((canvas, row) => drawSymptom(canvas, runs[row], 30, 0));
    drawSymptom($("symptom"), run, 150, 42);
    $("symptom").setAttribute("aria-label", `KL divergence over ${run.kl.length} positions. ${mistakeWords(run)}`);
    $("mistake-words").textContent = mistakeWords(run);
    for (const [name, text] of [["right", right], ["broken", run.text]]) {
      const stateOf = (token) => (token < given ? "given" : text[token] === right[token] ? "" : "wrong");
      showText($(`text-${name}`), text, text.length, stateOf);
    }
  }

  function show(number) {
    step = Math.min(last, Math.max(1, Number.isFinite(number) ? Math.round(number) : 1));
    const moment = data.steps[step - 1];
    $("slider").value = step;
    $("slider").setAttribute("aria-valuetext", `Step ${step} of ${last}`);
    $("place").textContent = `${step} of ${last}`;
    $("words").textContent = moment.words;
    showTexts(moment);
    drawGrids(moment);
    showTriangles(moment);
    const held = count(seenBy(moment, 0));
    const filled = data.layout.reserved > held ? `of ${data.layout.reserved} positions filled` : "positions cached";
    tally($("tally-on"), held.toLocaleString("en"), `${filled}, ${moment.counters[0][3][0]}`);
    tally($("tally-off"), moment.wasted.toLocaleString("en"), "token forwards computed again so far");
    showCounters(moment);
    showLikely(moment);
    showAttention(moment);
    try {
      history.replaceState(null, "", `#step=${step}`);
    } catch {
      // an embedded page has no address
    }
  }

  // ---- input ----------------------------------------------------------------------------------------------------

  function stop() {
    clearInterval(timer);
    timer = null;
    $("play").textContent = "Play";
    $("play").setAttribute("aria-pressed", "false");
    $("words").setAttribute("aria-live", "polite");
  }

  function play() {
    if (timer !== null) return stop();
    if (step === last) show(1);
    $("play").textContent = "Pause";
    $("play").setAttribute("aria-pressed", "true");
    $("words").setAttribute("aria-live", "off"); // a screen reader could not finish a step
    timer = setInterval(() => (step < last ? show(step + 1) : stop()), Math.max(150, Math.min(700, 30000 / last)));
    return undefined;
  }

  const by = (steps) => {
    stop();
    show(step + steps);
  };

  function onKey(event) {
    if (event.altKey || event.ctrlKey || event.metaKey || event.target.closest("input, select")) return;
    const moves = { ArrowLeft: -1, ArrowRight: 1, Home: -last, End: last };
    if (event.key in moves) {
      event.preventDefault();
      by(moves[event.key]);
    }
  }

  function choices(target, rows) {
    target.replaceChildren(...rows.map(([value, text]) => {
      const option = element("option", "", text);
      option.value = value;
      return option;
    }));
  }

  function legend() {
    const { bits, group, block, reserved } = data.layout;
    const drops = data.steps.some((moment) =>
      moment.seen.some((ranges) => count(ranges) < moment.fed[1][0] + moment.fed[1][1]));
    $("legend-reserved").hidden = !reserved;
    $("legend-gone").hidden = !drops;
    $("legend-rejected").hidden = !data.steps.some((moment) => moment.rejected.length);
    $("legend-bits").hidden = !bits;
    $("legend-block").hidden = !block;
    $("legend-bits").querySelector("span").textContent =
      `in ${bits} bits, once ${group} positions are full; the others in ${data.bits}`;
    $("legend-block").querySelector("span").textContent = `a block of ${block} positions`;
  }

  const fromAddress = () => Number(new URLSearchParams(location.hash.slice(1)).get("step") || NaN);
  const again = () => { show(step); showMistake(); };

  $("watch").hidden = false;
  $("slider").max = last;
  choices($("layer"), data.attended.map((layer) => [layer, layer + 1]));
  choices($("head"), [["mean", "mean of all"], ...Array.from({ length: data.heads }, (_, h) => [h, h + 1])]);
  $("layer").selectedIndex = Math.floor(data.attended.length / 2);
  for (const axis of document.querySelectorAll(".layers")) axis.textContent = `↓ layers 1 to ${data.layers}`;
  for (const axis of document.querySelectorAll(".positions")) axis.textContent = `positions 0 to ${total - 1} →`;
  legend();
  makeCounters();
  makeQuestions();
  makeMistakes();
  $("play").addEventListener("click", play);
  $("back").addEventListener("click", () => by(-1));
  $("next").addEventListener("click", () => by(1));
  $("slider").addEventListener("input", () => by(Number($("slider").value) - step));
  for (const chosen of ["layer", "head"]) $(chosen).addEventListener("change", () => show(step));
  document.addEventListener("keydown", onKey);
  window.addEventListener("hashchange", () => by(fromAddress() - step));
  window.addEventListener("resize", () => {
    reserveText();
    again();
  });
  for (const media of ["(prefers-color-scheme: dark)", "print"]) matchMedia(media).addEventListener("change", again);
  reserveText();
  show(fromAddress());
  showMistake();
})();
