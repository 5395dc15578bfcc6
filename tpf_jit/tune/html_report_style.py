"""The style sheet of the report: both colour schemes, no font, image or script from anywhere."""

STYLE = """
:root { color-scheme: light dark; --text: #1c2126; --faint: #5d6873; --line: #d5dbe1; --panel: #f5f7f9; --page: #ffffff;
  --bad: #b3261e; --good: #1a6e3c;
  --c0: #0b63b0; --c1: #b8560f; --c2: #0f7a5a; --c3: #9a3b86; --c4: #7a6a00; --c5: #4f56c4; --c6: #a33a3a; --c7: #4d6b7a; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e4e8ec; --faint: #9aa6b2; --line: #39424b; --panel: #1b2127; --page: #12161a; --bad: #ff9d94; --good: #7fd6a0;
    --c0: #6cb6ff; --c1: #ffa657; --c2: #56d4a5; --c3: #e39bd3; --c4: #e3cf5a; --c5: #a5a9ff; --c6: #ff9a94; --c7: #9fc0d0; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem; max-width: 1280px; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; margin: 0 0 .3rem; } h2 { font-size: 1.2rem; margin: 2.4rem 0 .4rem; }
h3 { font-size: 1rem; margin: 1.2rem 0 .3rem; } p { margin: .3rem 0 .8rem; max-width: 90ch; } .note { color: var(--faint); }
nav { display: flex; flex-wrap: wrap; gap: .2rem 1rem; } a { color: var(--c0); }
.tiles { display: flex; flex-wrap: wrap; gap: .8rem; margin: 1rem 0; }
.tile { background: var(--panel); border-radius: 8px; padding: .6rem 1rem; min-width: 8rem; }
.tile b { display: block; font-size: 1.4rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(440px, 100%), 1fr)); gap: 1rem; margin: 0 0 1rem; }
.small { grid-template-columns: repeat(auto-fit, minmax(min(300px, 100%), 1fr)); }
figure { margin: 0; background: var(--panel); border-radius: 8px; padding: .7rem; }
figcaption { font-weight: 600; margin-bottom: .3rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .88rem; } th, td { padding: .25rem .6rem; text-align: left; vertical-align: top; }
th { border-bottom: 2px solid var(--line); white-space: nowrap; } td { border-bottom: 1px solid var(--line); }
td:first-child { white-space: nowrap; } .date { white-space: nowrap; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td code { display: block; min-width: 17rem; }
code { font: .86em/1.4 ui-monospace, monospace; }
.bad { color: var(--bad); } .good { color: var(--good); }
details { margin: .4rem 0 1rem; } summary { cursor: pointer; }
svg { display: block; width: 100%; height: auto; font: 11px system-ui, sans-serif; }
svg text { fill: var(--faint); } svg text.label { fill: var(--text); font-size: 12px; } svg text.name { font-weight: 600; }
svg .grid { stroke: var(--line); stroke-width: .7; } svg .axis { stroke: var(--faint); fill: none; }
svg .line { fill: none; stroke-width: 1.8; } svg .roof { stroke-dasharray: 5 4; stroke-width: 1.4; }
svg .line.text { stroke: var(--text); } svg circle.text, svg rect.text { fill: var(--text); } svg .faint { fill-opacity: .45; }
""" + "\n".join(
    f"svg .line.c{i} {{ stroke: var(--c{i}); }} svg circle.c{i}, svg rect.c{i}, svg text.t{i} {{ fill: var(--c{i}); }}"
    for i in range(8)
)
