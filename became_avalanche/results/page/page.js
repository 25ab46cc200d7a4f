"use strict";
// Sorts the tables and draws the charts. Text from records is always set as text and never parsed as HTML.
(() => {
  const MARKS = [
    "M4.5 0A4.5 4.5 0 1 1-4.5 0 4.5 4.5 0 1 1 4.5 0Z", "M-4-4H4V4H-4Z", "M0-5.5 5 4H-5Z", "M0-5.8 5.8 0 0 5.8-5.8 0Z",
    "M0 5.5 5-4H-5Z", "M-1.8-5H1.8V-1.8H5V1.8H1.8V5H-1.8V1.8H-5V-1.8H-1.8Z",
  ];
  const DASHES = ["none", "8 4", "2 3", "10 3 2 3"];
  const BANDS = 5; // with more lines than this, the bands of standard deviations would hide the lines
  const REFERENCE = { colour: "reference", dash: "1 5", mark: "M0 0" };

  /** Creates an element. Attributes that are functions become event listeners. */
  function el(tag, attributes = {}, ...children) {
    const [name, space] = tag.startsWith("svg:") ? [tag.slice(4), "http://www.w3.org/2000/svg"] : [tag, "http://www.w3.org/1999/xhtml"];
    const element = document.createElementNS(space, name);
    for (const [key, value] of Object.entries(attributes)) {
      if (typeof value === "function") element.addEventListener(key, value);
      else if (value === true) element.setAttribute(key, "");
      else if (value !== false && value !== null) element.setAttribute(key, value);
    }
    element.append(...children);
    return element;
  }

  const number = (value, digits) => value.toFixed(digits);
  const signed = (value) => (value > 0 ? "+" : "") + number(value, 2);
  const range = (first, last) => Array.from({ length: Math.max(0, last - first + 1) }, (_, i) => first + i);

  // ------------------------------------------------------------------------------------------------------- the page

  const theme = document.getElementById("theme");
  theme.addEventListener("change", () => {
    if (theme.value) document.documentElement.dataset.theme = theme.value;
    else delete document.documentElement.dataset.theme;
  });

  function sortable(table) {
    const headings = [...table.tHead.rows[0].cells];
    const body = table.tBodies[0];
    const original = [...body.rows];
    headings.forEach((heading, column) => heading.querySelector("button").addEventListener("click", () => {
      // numbers: descending, ascending, original order; names: ascending, descending, original order
      const cycle = heading.classList.contains("number") ? ["none", "descending", "ascending"] : ["none", "ascending", "descending"];
      const order = cycle[(cycle.indexOf(heading.getAttribute("aria-sort")) + 1) % 3];
      headings.forEach((other) => other.setAttribute("aria-sort", other === heading ? order : "none"));
      const sign = order === "descending" ? -1 : 1;
      const rows = order === "none" ? original : original.slice().sort((a, b) => {
        const [x, y] = [a, b].map((row) => row.cells[column].dataset.value);
        if (x === "" || y === "") return (x === "") - (y === ""); // empty cells come last
        return sign * (heading.classList.contains("number") ? x - y : x.localeCompare(y));
      });
      body.append(...rows);
    }));
  }

  function choosable(section) {
    for (const box of section.querySelectorAll(".columns input")) {
      box.addEventListener("change", () => {
        for (const cell of section.querySelectorAll("[data-metric]")) {
          if (cell.dataset.metric === box.value) cell.hidden = !box.checked;
        }
      });
    }
  }

  function savable(button) {
    button.addEventListener("click", () => {
      const text = button.closest(".run").querySelector(".spec").textContent;
      const address = URL.createObjectURL(new Blob([text], { type: "application/json" }));
      el("a", { href: address, download: button.dataset.name }).click();
      setTimeout(() => URL.revokeObjectURL(address), 1000);
    });
  }

  // ------------------------------------------------------------------------------------------------------ the charts

  /** Colour, dash and mark of series number k. Dashes and marks can be told apart without colour. */
  const style = (k) => (k < 0 ? REFERENCE : { colour: `s${k % 8}`, dash: DASHES[k % 4], mark: MARKS[k % 6] });

  function swatch(k) {
    const { colour, dash, mark } = style(k);
    return el("svg:svg", { class: `swatch ${colour}`, viewBox: "0 0 42 16", "aria-hidden": "true" },
      el("svg:path", { class: "series", d: "M1 8H41", "stroke-dasharray": dash }),
      el("svg:path", { class: "mark", d: mark, transform: "translate(21 8)" }));
  }

  /** Round tick values that cover the range from low to high. */
  function ticks(low, high, count) {
    const raw = (high - low || 1) / count;
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = power * [1, 2, 2.5, 5, 10].find((factor) => factor * power >= raw * 0.999);
    return range(Math.floor(low / step + 1e-9), Math.ceil(high / step - 1e-9)).map((i) => Number((i * step).toPrecision(12)));
  }

  /**
   * Draws a line chart with a cursor that follows the pointer and the arrow keys.
   * get() returns {title, x, y, digits, unit, from, to, limits, include, series: [{label, k, points: [[x, mean, std], ...]}]}.
   */
  function lineChart(id, caption, get, controls = []) {
    const plot = el("div", { class: "plot", role: "slider", tabindex: "0", "aria-orientation": "horizontal" });
    const readout = el("div", { class: "readout" });
    const numbers = el("div", { class: "scroll heat-scroll" });
    const figure = el("figure", { class: "chart", id },
      el("h3", {}, caption), ...controls, el("div", { class: "split" }, plot, readout),
      el("details", {}, el("summary", {}, "Data of this chart"), numbers));
    const [right, top, bottom] = [12, 10, 42];
    let now, cursor, toX, left;

    function move(x) {
      cursor = Math.min(now.to, Math.max(now.from, Math.round(x)));
      const line = plot.querySelector(".cursor");
      if (line) { line.setAttribute("x1", toX(cursor)); line.setAttribute("x2", toX(cursor)); }
      const values = now.series
        .map((series) => ({ ...series, at: series.points.find(([at, mean]) => at === cursor && mean !== null) }))
        .filter((series) => series.at)
        .sort((a, b) => b.at[1] - a.at[1]);
      const text = ({ at: [, mean, std] }) => [number(mean, now.digits), std === null ? "" : ` ± ${number(std, now.digits)}`];
      readout.replaceChildren(el("h4", {}, now.title(cursor)), el("ol", {}, ...values.map((series) =>
        el("li", {}, swatch(series.k), el("span", {}, series.label), el("b", {}, text(series)[0], el("small", {}, text(series)[1]))))));
      plot.setAttribute("aria-valuenow", cursor);
      plot.setAttribute("aria-valuetext", `${now.title(cursor)}: ${values.map((s) => `${s.label} ${text(s)[0]}${now.unit}`).join(", ") || "no values"}`);
    }

    function draw() {
      now = get();
      if (cursor === undefined || cursor > now.to || cursor < now.from) cursor = now.to;
      const width = Math.max(260, plot.clientWidth || 640), height = Math.round(Math.min(360, Math.max(230, width * 0.5)));
      const points = now.series.flatMap((series) => series.points.filter(([, mean]) => mean !== null));
      const banded = now.series.length <= BANDS;
      const [least, most] = now.limits;
      const within = (y) => Math.min(most, Math.max(least, y));
      const all = [...points.flatMap(([, mean, std]) => [mean, ...(banded ? [-std, +std].map((by) => within(mean + by)) : [])]), ...now.include];
      const marks = ticks(all.length ? Math.min(...all) : 0, all.length ? Math.max(...all) : 1, 5);
      const [low, high] = [marks[0], marks[marks.length - 1]];
      left = 24 + 8 * Math.max(...marks.map((y) => String(y).length));
      toX = (x) => left + (width - left - right) * (now.to === now.from ? 0.5 : (x - now.from) / (now.to - now.from));
      const toY = (y) => top + (height - top - bottom) * (high - y) / (high - low || 1);
      const every = Math.ceil((now.to - now.from + 1) / Math.max(2, Math.floor(width / 45)));
      const picture = el("svg:svg", { viewBox: `0 0 ${width} ${height}`, width, height, "aria-hidden": "true" },
        ...marks.flatMap((y) => [
          el("svg:line", { class: "grid", x1: left, x2: width - right, y1: toY(y), y2: toY(y) }),
          el("svg:text", { x: left - 8, y: toY(y) + 4, "text-anchor": "end" }, String(y))]),
        ...range(now.from, now.to).filter((x) => (x - now.from) % every === 0).map((x) =>
          el("svg:text", { x: toX(x), y: height - bottom + 20, "text-anchor": "middle" }, String(x))),
        el("svg:text", { x: (left + width - right) / 2, y: height - 4, "text-anchor": "middle" }, now.x),
        el("svg:text", { x: -(top + height - bottom) / 2, y: 12, "text-anchor": "middle", transform: "rotate(-90)" }, now.y),
        el("svg:line", { class: "cursor", y1: top, y2: height - bottom, x1: toX(cursor), x2: toX(cursor) }));
      for (const { k, points: path, label } of now.series) {
        const known = path.filter(([, mean]) => mean !== null);
        if (!known.length) continue;
        const { colour, dash, mark } = style(k);
        const group = el("svg:g", { class: colour, "data-label": label });
        const edge = (sign) => ([x, mean, std]) => `${toX(x)} ${toY(within(mean + sign * std))}`;
        if (banded && known.every(([, , std]) => std !== null) && known.length > 1) {
          group.append(el("svg:path", { class: "band", d: `M${[...known.map(edge(1)), ...known.map(edge(-1)).reverse()].join("L")}Z` }));
        }
        group.append(el("svg:path", { class: "series", "stroke-dasharray": dash, d: `M${known.map(([x, mean]) => `${toX(x)} ${toY(mean)}`).join("L")}` }));
        if (known.length <= 40) group.append(...known.map(([x, mean]) => el("svg:path", { class: "mark", d: mark, transform: `translate(${toX(x)} ${toY(mean)})` })));
        picture.append(group);
      }
      plot.replaceChildren(picture);
      for (const [key, value] of Object.entries({ label: `${caption}. Use the arrow keys to move from task to task.`, valuemin: now.from, valuemax: now.to })) {
        plot.setAttribute(`aria-${key}`, value);
      }
      numbers.replaceChildren(el("table", { class: "numbers" },
        el("thead", {}, el("tr", {}, el("th", { scope: "col" }, now.x), ...range(now.from, now.to).map((x) => el("th", { scope: "col" }, String(x))))),
        el("tbody", {}, ...now.series.map((series) => el("tr", {}, el("th", { scope: "row" }, series.label),
          ...range(now.from, now.to).map((x) => {
            const at = series.points.find((point) => point[0] === x);
            return el("td", {}, at && at[1] !== null ? number(at[1], now.digits) : "–");
          }))))));
      move(cursor);
    }

    plot.addEventListener("pointermove", (event) => {
      const box = plot.getBoundingClientRect();
      move(now.from + (now.to - now.from) * (event.clientX - box.left - left) / (box.width - left - right));
    });
    plot.addEventListener("keydown", (event) => {
      const target = { ArrowLeft: cursor - 1, ArrowDown: cursor - 1, ArrowRight: cursor + 1, ArrowUp: cursor + 1, Home: now.from, End: now.to }[event.key];
      if (target !== undefined) { event.preventDefault(); move(target); }
    });
    let width = 0;
    new ResizeObserver(() => { if (plot.clientWidth !== width) { width = plot.clientWidth; draw(); } }).observe(plot);
    return { figure, draw };
  }

  /** Creates buttons and a slider that step from one number to the next. */
  function stepper(name, first, last, value, describe, changed) {
    const slider = el("input", { type: "range", min: first, max: last, step: 1, value, "aria-label": name });
    const text = el("output");
    const step = (by) => () => { slider.value = Number(slider.value) + by; update(); };
    const back = el("button", { type: "button", "aria-label": `${name}: previous`, click: step(-1) }, "◀");
    const forth = el("button", { type: "button", "aria-label": `${name}: next`, click: step(1) }, "▶");
    function update() {
      const at = Number(slider.value);
      text.textContent = describe(at);
      slider.setAttribute("aria-valuetext", describe(at));
      back.disabled = at === first; forth.disabled = at === last;
      changed(at);
    }
    slider.addEventListener("input", update);
    const set = (at) => { slider.value = at; update(); };
    return { bar: el("div", { class: "bar" }, back, slider, forth, text), set };
  }

  function accuracyChart(id, data, chosen) {
    let task = 0;
    const control = stepper("Task to show", 0, data.tasks, 0,
      (i) => (i ? `only task ${i}` : "mean over the tasks learned so far"), (i) => { task = i; if (chart) chart.draw(); });
    let chart = null;
    chart = lineChart(id, "Accuracy during training", () => ({
      title: (t) => `${task ? `Task ${task}` : "All tasks learned"}, after ${t} task${t > 1 ? "s" : ""}`,
      x: "tasks learned", y: "accuracy %", digits: 2, unit: " %", from: task || 1, to: data.tasks, limits: [0, 100], include: [],
      series: chosen().map((method) => ({
        label: method.label, k: method.k,
        points: range(task || 1, data.tasks).map((t) => [t, ...(task ? method.accuracy[t - 1][task - 1] : method.average[t - 1])]),
      })),
    }), [control.bar]);
    control.set(0);
    return chart;
  }

  function taskChart(id, data, chosen) {
    let after = data.tasks, task = 1;
    const table = el("table", { class: "heat" });
    const readout = el("div", { class: "readout", role: "status" });
    const control = stepper("Tasks learned", 1, data.tasks, data.tasks,
      (t) => `after ${t} of ${data.tasks} tasks`, (t) => { after = t; draw(); });
    const figure = el("figure", { class: "chart", id }, el("h3", {}, "Accuracy per task and method"),
      el("p", { class: "hint" }, "Accuracy in percent. Step through training with the slider. Point at a task or press it to rank the methods on it."),
      control.bar, el("div", { class: "split" }, el("div", { class: "scroll heat-scroll", tabindex: "0", role: "region", "aria-label": "Accuracy per task and method" }, table), readout));

    function choose(i) {
      task = i;
      for (const cell of table.querySelectorAll("[data-task]")) cell.classList.toggle("chosen", Number(cell.dataset.task) === i);
      for (const button of table.querySelectorAll("button")) button.setAttribute("aria-pressed", String(Number(button.value) === i));
      const values = chosen().map((method) => ({ ...method, at: method.accuracy[after - 1][i - 1] }))
        .filter((method) => method.at && method.at[0] !== null).sort((a, b) => b.at[0] - a.at[0]);
      readout.replaceChildren(el("h4", {}, `Task ${i}, after ${after} task${after > 1 ? "s" : ""}`), el("ol", {}, ...values.map((method) =>
        el("li", {}, swatch(method.k), el("span", {}, method.label), el("b", {}, number(method.at[0], 2),
          el("small", {}, method.at[1] === null ? "" : ` ± ${number(method.at[1], 2)}`))))));
    }

    function draw() {
      const methods = chosen();
      const values = data.methods.flatMap((method) => method.accuracy.flat()).map(([mean]) => mean).filter((mean) => mean !== null);
      const [low, high] = [Math.min(...values), Math.max(...values)];
      table.replaceChildren(
        el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "Method"), ...range(1, after).map((i) =>
          el("th", { scope: "col" }, el("button", { type: "button", value: i, "aria-label": `Task ${i}`, click: () => choose(i), pointerenter: () => choose(i), focus: () => choose(i) }, String(i)))))),
        el("tbody", {}, ...methods.map((method) => el("tr", {}, el("th", { scope: "row", title: method.label }, method.label),
          ...method.accuracy[after - 1].map(([mean], index) => {
            const cell = el("td", { "data-task": index + 1, pointerenter: () => choose(index + 1) }, mean === null ? "–" : number(mean, 1));
            if (mean !== null) cell.style.background = `color-mix(in srgb, var(--c0) ${Math.round(4 + 50 * (mean - low) / (high - low || 1))}%, var(--page))`;
            return cell;
          })))));
      choose(Math.min(task, after));
    }
    control.set(data.tasks);
    return { figure, draw };
  }

  function gainChart(id, data) {
    const plot = el("div", { class: "gains" });
    const figure = el("figure", { class: "chart", id }, el("h3", {}, "Gain of the second stage"),
      el("p", { class: "hint" }, "Mean difference of ACC in points with its 95 % interval, paired by seed. If the interval contains zero, the gain may be chance."), plot);
    function draw() {
      const width = Math.max(260, plot.clientWidth || 640), narrow = width < 560, row = narrow ? 50 : 34;
      const left = narrow ? 12 : Math.min(330, width * 0.4), right = 16;
      const all = [0, ...data.gains.flatMap((gain) => [gain.gain, ...gain.interval])];
      const marks = ticks(Math.min(...all), Math.max(...all), narrow ? 4 : 7);
      const toX = (x) => left + (width - left - right) * (x - marks[0]) / (marks[marks.length - 1] - marks[0] || 1);
      const height = row * data.gains.length + 36;
      const sentence = data.gains.map((gain) => `${gain.label} over ${gain.over} ${signed(gain.gain)}${gain.interval.length ? `, interval ${gain.interval.map(signed).join(" to ")}` : ""}`).join("; ");
      plot.replaceChildren(el("svg:svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": `Gains in points of ACC: ${sentence}` },
        ...marks.flatMap((x) => [
          el("svg:line", { class: x === 0 ? "zero" : "grid", x1: toX(x), x2: toX(x), y1: 0, y2: height - 30 }),
          el("svg:text", { x: toX(x), y: height - 12, "text-anchor": "middle" }, x > 0 ? `+${x}` : String(x))]),
        ...data.gains.map((gain, i) => {
          const y = row * i + row / 2 + (narrow ? 10 : 0), { colour, mark } = style(gain.over.endsWith("-2x") ? 1 : 0);
          return el("svg:g", { class: colour },
            el("svg:text", { class: "strong", x: narrow ? 0 : left - 14, y: narrow ? y - 14 : y + 4, "text-anchor": narrow ? "start" : "end" }, `${gain.label} over ${gain.over}`),
            ...(gain.interval.length ? [el("svg:line", { class: "whisker", x1: toX(gain.interval[0]), x2: toX(gain.interval[1]), y1: y, y2: y })] : []),
            el("svg:path", { class: "mark", d: mark, transform: `translate(${toX(gain.gain)} ${y})` }));
        })));
    }
    let width = 0;
    new ResizeObserver(() => { if (plot.clientWidth !== width) { width = plot.clientWidth; draw(); } }).observe(plot);
    return { figure, draw };
  }

  function coefficientChart(id, data, chosen) {
    return lineChart(id, "Merging coefficient λ", () => {
      const merging = chosen().filter((method) => method.coefficients.length);
      return {
        title: (t) => `Task ${t}`, x: "task", y: "λ", digits: 3, unit: "", from: 2, to: data.tasks, limits: [0, 1], include: [0, 1],
        series: [...merging.map((method) => ({ label: method.label, k: method.k, points: range(2, data.tasks).map((t) => [t, ...method.coefficients[t - 1]]) })),
          { label: "1/t", k: -1, points: range(2, data.tasks).map((t) => [t, 1 / t, null]) }],
      };
    });
  }

  function rankChart(id, data) {
    const methods = data.methods.filter((method) => Object.keys(method.ranks).length);
    let method = methods[0];
    const select = el("select", { change: () => { method = methods[select.selectedIndex]; chart.draw(); } }, ...methods.map(({ label }) => el("option", {}, label)));
    const chart = lineChart(id, "Rank of the memory of each layer", () => ({
      title: (t) => `${method.label}, after ${t} task${t > 1 ? "s" : ""}`, x: "tasks learned", y: "rank", digits: 1, unit: "", from: 1, to: data.tasks, limits: [0, Infinity], include: [0],
      series: Object.entries(method.ranks).map(([layer, values], k) => ({ label: layer, k, points: values.map((pair, t) => [t + 1, ...pair]) })),
    }), [el("div", { class: "bar" }, el("label", {}, "Method ", select))]);
    return chart;
  }

  function picker(data, changed) {
    const boxes = data.methods.map((method) => {
      const box = el("input", { type: "checkbox", change: changed });
      box.checked = method.shown;
      return box;
    });
    const set = (value) => () => { boxes.forEach((box) => { box.checked = value; }); changed(); };
    const field = el("fieldset", { class: "picker" }, el("legend", {}, "Methods in the charts"),
      ...data.methods.map((method, i) => el("label", {}, boxes[i], swatch(method.k), method.label)),
      el("span", { class: "all" }, el("button", { type: "button", click: set(true) }, "All"), el("button", { type: "button", click: set(false) }, "None")));
    return { field, chosen: () => data.methods.filter((_, i) => boxes[i].checked) };
  }

  function charts(place, data, n) {
    data.methods.forEach((method, k) => { method.k = k; });
    const choice = picker(data, () => drawn.forEach((chart) => chart.draw()));
    const measured = data.methods.some((method) => method.accuracy.flat().some(([mean]) => mean !== null));
    const drawn = [];
    if (measured) drawn.push(accuracyChart(`accuracy-${n}`, data, choice.chosen), taskChart(`tasks-${n}`, data, choice.chosen));
    if (data.gains.length) drawn.push(gainChart(`gains-${n}`, data));
    if (data.tasks > 1 && data.methods.some((method) => method.coefficients.length)) drawn.push(coefficientChart(`coefficients-${n}`, data, choice.chosen));
    if (data.methods.some((method) => Object.keys(method.ranks).length)) drawn.push(rankChart(`ranks-${n}`, data));
    if (measured) place.append(choice.field);
    place.append(...drawn.map((chart) => chart.figure));
    drawn.forEach((chart) => chart.draw());
  }

  const content = JSON.parse(document.getElementById("data").textContent);
  document.querySelectorAll(".benchmark").forEach((section, n) => {
    sortable(section.querySelector(".results"));
    choosable(section);
    charts(section.querySelector("[data-charts]"), content[n], n + 1);
  });
  document.querySelectorAll(".save").forEach(savable);
})();
