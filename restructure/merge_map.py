"""The map: target file under src/fedpact (dotted) <- old modules (dotted, without fedpact.).

A source may end with `!`: its module docstring is kept whole, in place of a new first line.
"""

MAP = """
core.errors <- errors
core.check <- check
core.format <- text
core.files <- files
core.configuration <- configuration
core.reference <- reference.forms, reference.keys, reference.meanings, reference.sources, reference.tables
core.records <- records.rounds
core.messages <- messages
core.params <- params
core.losses <- losses
core.notebook <- shown.cards, shown.colours, shown.progress, shown.tables
core.run_folder <- control.costs, engines.together, folder
core.user_code <- own.digests, own.named
core.about <- ledger.about
core.weights <- models.weights
core.randomness.keystream <- draws.keystream
core.randomness.schedules <- draws.schedules
core.randomness.secure <- draws.grid, draws.secure
core.randomness.seeded <- draws.participants, draws.seeded, draws.shares

plan <- plan, shown.plans
rounds <- round
client <- client
api <- api

privacy.batches <- privacy.batch_clipped, privacy.batches, privacy.guarded
privacy.column_scales <- privacy.columns
privacy.mechanisms <- privacy.mechanisms
privacy.oracle <- privacy.around, privacy.charge, privacy.oracle, privacy.records
privacy.policy <- privacy.policy
privacy.reply_bounds <- privacy.reach
privacy.settings <- privacy.settings
privacy.terms <- privacy.sizes, privacy.terms, privacy.once
privacy.request <- privacy.request
privacy.accounting.accountant <- theory.accounting
privacy.accounting.calibration <- theory.calibration
privacy.accounting.gaussian <- theory.gaussian, theory.special
privacy.accounting.group_privacy <- theory.persons
privacy.accounting.planner <- theory.aggregation, theory.full_batch, theory.planner
privacy.accounting.pld <- theory.pld, theory.running
privacy.accounting.characteristic_function <- theory.contour
privacy.accounting.rdp <- theory.rdp
privacy.accounting.shared_noise <- theory.shares
privacy.accounting.tuning_cost <- papers.selection
privacy.ledger.ledger <- ledger.ledger
privacy.ledger.hash_chain <- ledger.chain
privacy.ledger.receipt <- ledger.receipt
privacy.ledger.remaining <- ledger.remaining
privacy.ledger.reservations <- ledger.family, ledger.reservations
privacy.ledger.rollback_guard <- ledger.witness

models.build <- models.build
models.initial <- models.held, models.initial
models.views <- models.views
models.zoo <- models.normalise, models.papers, models.text

data.advice <- data.columns.advice, data.columns.known
data.cells <- data.cells, data.tables
data.dataset <- data.dataset
data.download <- data.download, data.files
data.from_python <- data.given.handed
data.inputs <- data.given.__init__, data.given.parts
data.load <- data.datasets
data.partition <- data.kinds, data.partition
data.public <- data.columns.adult, data.heart, data.images, data.synthetic, data.text.shakespeare
data.schema <- data.columns.scaling, data.form
data.site_records <- data.sites
data.splits <- data.splits
data.tables <- data.own
data.sieve <- data.sieve
data.targets <- data.given.classes, data.given.persons, data.given.targets
data.features.extract <- features.cache, features.extract, features.sealed, features.whitening
data.features.kinds <- features.kinds, features.made, features.patches, features.scattering
data.features.user_module <- features.backbone, features.held
data.features.settings <- features.settings
data.features.stage <- features.stage

evaluation.metrics <- metrics, tasks.measures
evaluation.held_out <- evaluation.groups, evaluation.promise, evaluation.split, evaluation.totals
evaluation.intervals <- evaluation.early, evaluation.figures, evaluation.outcome, evaluation.told
evaluation.personal <- personal.choice, personal.joining, personal.tuning
evaluation.settings <- evaluation.settings
evaluation.tasks <- tasks.losses, tasks.settings

algorithms.common.fairness <- fairness
algorithms.common.limits <- control.limits
algorithms.common.steps <- local
algorithms.common.tau <- theory.tau
algorithms.common.tau_control <- control.__init__, control.server
algorithms.common.tau_site <- control.site
algorithms.wrappers.base <- methods.__init__
algorithms.wrappers.combine <- methods.combine
algorithms.wrappers.compression <- methods.compressed, methods.gridded, methods.short
algorithms.wrappers.integers <- methods.integers, methods.linear
algorithms.wrappers.effective <- methods.effective
algorithms.wrappers.fairness <- methods.fair
algorithms.wrappers.local_optimizer <- methods.heads, methods.stepped
algorithms.wrappers.released_scales <- methods.released
algorithms.wrappers.robust <- methods.folding, methods.robust
algorithms.wrappers.secure <- methods.secure
algorithms.wrappers.server_optimizer <- methods.server
algorithms.wrappers.tau <- methods.controlled

simulation.evaluation <- engines.evaluation
simulation.extend <- engines.extended
simulation.flower_records <- engines.flower.codec
simulation.machine <- engines.process
simulation.predict <- engines.asked, engines.served
simulation.ray <- engines.flower.actor, engines.flower.cluster
simulation.record_trial <- engines.parties.entrance
simulation.require_flower <- engines.flower.__init__
simulation.resume <- engines.resume
simulation.run <- engines.run
simulation.setup <- engines.scene
simulation.simulate <- engines.joining, engines.simulation
simulation.stacked <- engines.stacked
simulation.statement <- engines.statement
simulation.threads <- engines.inprocess, engines.virtual
simulation.trackers <- records.writers
simulation.workshop <- engines.workshop
simulation.secure_aggregation.client <- engines.secure.opened, engines.secure.site
simulation.secure_aggregation.encoding <- engines.secure.ring, engines.secure.shared
simulation.secure_aggregation.graph <- engines.secure.circle, theory.neighbours
simulation.secure_aggregation.keys <- engines.secure.keys, engines.secure.shamir
simulation.secure_aggregation.messages <- engines.secure.wire
simulation.secure_aggregation.session <- engines.secure.server
simulation.secure_aggregation.setup <- engines.secure.simulated
simulation.secure_aggregation.signing <- engines.flower.seal
simulation.secure_aggregation.statement <- engines.secure.told
simulation.secure_aggregation.transport <- engines.secure.exchange

deployment.admission <- engines.parties.admission, engines.parties.standing
deployment.extend <- deploy.extend
deployment.federation <- engines.parties.federation
deployment.files <- deploy.texts, deploy.write
deployment.final_model <- engines.parties.final
deployment.keys <- deploy.keys
deployment.local <- deploy.local
deployment.live <- watch.command, watch.metrics, watch.serving, watch.snapshot
deployment.party <- deploy.party
deployment.processes <- deploy.processes, deploy.running
deployment.receipts <- deploy.receipts
deployment.secure <- engines.secure.deployed
deployment.server <- engines.parties.coordinator, engines.parties.handover
deployment.site <- engines.parties.left_behind, engines.parties.site
deployment.site_evaluation <- engines.parties.cost, engines.parties.examiner, engines.parties.personal, engines.parties.progress, engines.parties.questions, engines.parties.stored
deployment.site_records <- engines.parties.records
deployment.flower.credentials <- engines.flower.credentials
deployment.flower.program <- engines.flower.program
deployment.flower.server_process <- engines.flower.control, engines.flower.database, engines.flower.server
deployment.flower.site_process <- engines.flower.gate, engines.flower.runtime, engines.flower.worker
deployment.flower.requests <- engines.flower.inbox, engines.flower.underway
deployment.flower.transport <- engines.flower.transport

report.charts <- report.charts.budgets, report.charts.figures
report.comparable <- report.canonical, report.equality
report.compared_runs <- report.counted, report.outcomes
report.comparison <- report.cells, report.comparison, report.effort, report.reached
report.comparison_charts <- report.charts.overlay
report.convergence <- papers.facts, papers.rates, papers.wire
report.drawing <- report.charts.drawing
report.evaluations <- report.evaluations
report.export <- report.exports.facts, report.exports.registry
report.model_card <- report.exports.model_card, report.exports.summary
report.joining <- report.joining
report.meaning <- report.officer
report.page <- report.page, report.repeat
report.run_files <- report.audits, report.charts.labels, report.reading
report.template <- report.templates
report.tradeoffs <- papers.composition, papers.tradeoffs, papers.tradeoffs_table

studies.compare <- comparison.compare, comparison.compared, comparison.entrants
studies.pool <- comparison.here, comparison.pool, comparison.sweep
studies.worker <- comparison.worker
studies.optimise <- recommend.optimise
studies.recommend <- recommend.recommendation, recommend.scale, recommend.told
studies.circumstances <- recommend.circumstances, recommend.noise
studies.starting_plan <- reference.starting
studies.audit.attacks <- audit.many_runs, audit.membership, audit.one_run
studies.audit.bounds <- audit.bounds
studies.audit.findings <- audit.findings
studies.audit.noise <- audit.noise_level, audit.sampling
studies.audit.target <- audit.target, audit.views
studies.papers.fedfdp <- papers.fedfdp, theory.fairness
studies.papers.fedproxvr <- papers.fedproxvr, papers.figure
studies.papers.measure <- papers.curvature, papers.measure
studies.papers.proxvr_search <- papers.proxvr, papers.proxvr_search

cli.account <- cli.account
cli.audit <- cli.audit
cli.compare <- cli.compare
cli.console <- cli.console
cli.data <- cli.data
cli.deploy <- cli.deploy
cli.export <- cli.export
cli.ledger <- cli.ledger
cli.main <- cli.main
cli.options <- cli.options
cli.personalise <- cli.personalise
cli.plan <- cli.plan
cli.recommend <- cli.recommend
cli.report <- cli.report
cli.run <- cli.run
cli.settings <- cli.reference
"""

# Whole packages whose modules keep their names, whatever modules they have.
KEEP = ("algorithms", "persample", "cli.commands")
# The same for single modules.
KEEP_MODULES = ("__init__", "__main__")

# Old package -> new one, for imports of a package as such and for its data files.
PACKAGES = {
    "reference": "core", "records": "core", "shown": "core", "own": "core", "draws": "core.randomness",
    "theory": "privacy.accounting", "ledger": "privacy.ledger", "privacy": "privacy",
    "data": "data", "data.columns": "data", "data.text": "data", "features": "data.features",
    "evaluation": "evaluation", "tasks": "evaluation", "personal": "evaluation",
    "engines": "simulation", "engines.secure": "simulation.secure_aggregation",
    "engines.parties": "deployment", "deploy": "deployment", "watch": "deployment",
    "report": "report", "report.charts": "report", "report.exports": "report",
    "papers": "studies.papers", "comparison": "studies", "recommend": "studies",
    "audit": "studies.audit", "models": "models", "cli": "cli",
}

# Data files, old folder -> new folder; a file not covered stays where it is.
RESOURCES = {
    "default.toml": "core/default.toml",
    "watch/page.html": "deployment/page.html",
    "report/exports/model_card.md.j2": "report/model_card.md.j2",
    "data/columns/": "data/",
}

# First line of the docstring of each package that is new or whose docstring changes.
PACKAGE_DOCS = {
    "core": "What every other package builds on: errors, checks, formats, files, messages, randomness.",
    "core.randomness": "Where randomness comes from: batches and noise, seeded or secure, which can be audited alone.",
    "privacy": "Everything that stands between the records and the outside: oracle, accounting, ledger.",
    "privacy.accounting": "Pure functions of numbers, in float64: no torch, no records, usable alone.",
    "privacy.ledger": "What a site has promised and spent: an auditor reads this folder, and no other.",
    "models": "The papers' models; any nn.Module works.",
    "data": "From files to partitions to a site's records, and the features computed of them.",
    "data.features": "What a site computes of each record by itself, once, before anything is trained on it.",
    "evaluation": "Tasks, metrics, and what a model is worth on held-out records, as a site may release it.",
    "algorithms.common": "What several algorithms share: local steps, fairness, the control of τ.",
    "algorithms.wrappers": "An algorithm with its settings, and what goes around any of them.",
    "simulation": "Carry a run out on one machine: set-up, threads or Ray, resuming, extending, predicting.",
    "simulation.secure_aggregation": None,  # takes the old docstring
    "deployment": "A federation on real machines: its files, keys, processes, and its two sides.",
    "deployment.flower": "The deployment's transport over Flower; nothing else imports Flower but the Ray engine.",
    "report": "Tables, figures and the page of a run; reads records of runs, never trains.",
    "studies": "Many runs side by side, recommendations, audits, and the papers' theory.",
    "studies.audit": None,
    "studies.papers": "Older theory of the papers, for comparison and for choosing parameters; loaded when called.",
    "cli": "The command line: one command a module; parses, builds a plan, calls.",
}
OLD_PACKAGE_DOCS = {"simulation.secure_aggregation": "engines.secure", "studies.audit": "audit"}

# First line of the docstring of each file made of several modules.
DOCS = {
    "core.reference": "What every key of a configuration and every algorithm's setting means, read from the sources.",
    "core.notebook": "What a notebook or a terminal shows of an object: cards, tables, a bar; the pages' colours.",
    "core.run_folder": "A run's folder: its files, the costs of its rounds, and changes to several files at once.",
    "core.user_code": "User code and objects in a plan: their names, their digests, and how they are found again.",
    "core.randomness.secure": "Randomness that nobody can foresee: secure draws, and the discrete Gaussian on a grid.",
    "core.randomness.seeded": "Seeded randomness: batches, noise, the sites of a round, and shares of noise.",
    "plan": "The validated configuration of a run, and how a notebook shows it.",
    "privacy.batches": "The clipped sums of batches: per record, per batch, and with records that fail counted as zero.",
    "privacy.oracle": "The only door to the records: clipped, noised, charged to the ledger before release.",
    "privacy.terms": "The terms of a site's releases: sizes, σ, ε and δ, and what is released once of all records.",
    "privacy.accounting.gaussian": "The Gaussian mechanism in closed form, and the special functions it needs.",
    "privacy.accounting.planner": "Plan σ, rates and rounds: aggregation, full batches, and the search over both.",
    "privacy.accounting.pld": "Privacy loss distributions: of a whole run, and composed round by round.",
    "privacy.ledger.reservations": "Reservations in a ledger, and the families of runs that share one.",
    "models.initial": "What a model begins with: released weights, its own start, and the numbers a module holds.",
    "models.zoo": "The papers' models for images, tables and text, and the scaling in front of them.",
    "data.advice": "Advice on a table's columns, and the columns of public tables that are known.",
    "data.cells": "Tables as files: lines to cells, and cells to numbers.",
    "data.download": "Public data sets as files: where they lie, their digests, and how they are downloaded.",
    "data.inputs": "Records that arrive as arrays or tables, and those of them that are used.",
    "data.partition": "The partitions of records over sites: kinds, settings, and their application.",
    "data.public": "The public data sets: Adult, heart disease, images, Shakespeare, and synthetic ones.",
    "data.schema": "The declared form of a table's records, and how its columns are scaled.",
    "data.targets": "Classes, persons and targets of records that arrive as arrays or tables.",
    "data.features.extract": "Features of records: computed once, whitened, and kept in an encrypted cache.",
    "data.features.kinds": "The kinds of features: random, patches, scattering, and a user's own module.",
    "data.features.user_module": "A user's module for features, and the check that it changes nothing as it runs.",
    "evaluation.metrics": "Metrics of a model's outputs, and the measures that a task reports.",
    "evaluation.held_out": "Held-out records: their split, their reservation, and the noisy sums released of them.",
    "evaluation.intervals": "Figures with intervals from noisy sums, early stopping by them, and how they are stated.",
    "evaluation.personal": "A model tuned and chosen inside its site, and whether joining pays.",
    "evaluation.tasks": "What is learnt: classes, numbers, several labels or pixels, and by which loss.",
    "algorithms.common.tau_control": None,
    "algorithms.wrappers.compression": "Fewer bytes: sparse vectors up, a grid of whole numbers, and changes in place of models.",
    "algorithms.wrappers.integers": "Whole numbers on the wire: their code, and the linear quantiser.",
    "algorithms.wrappers.local_optimizer": "The site's optimiser: its steps, and training of the head alone.",
    "algorithms.wrappers.robust": "Averages that hold against lies, and how replies are folded into one.",
    "simulation.predict": "Predictions and evaluations of a finished run's model on new records.",
    "simulation.ray": "Sites on a Ray cluster: the actor that carries out tasks, and the cluster's side.",
    "simulation.simulate": "Carry out a plan on one machine, and compare joining with going alone.",
    "simulation.threads": "Sites as threads of one process, and many virtual sites in turn.",
    "simulation.secure_aggregation.client": "A site's side of a session, and what it has opened already.",
    "simulation.secure_aggregation.encoding": "Vectors as whole numbers modulo 2^b, and noise that only the sum carries.",
    "simulation.secure_aggregation.graph": "Who masks with whom: the graph of neighbours, and its probabilities of failure.",
    "simulation.secure_aggregation.keys": "Keys, masks and signatures of a session, and Shamir's shares of them.",
    "deployment.admission": "Who may take part: the server's checks of a site, and the ledgers it has seen.",
    "deployment.files": "The files of a deployment: their texts, and how they are written.",
    "deployment.live": "A run, live: what its files say, as a page on this machine, as JSON, and for Prometheus.",
    "deployment.processes": "The processes of the parties: started, watched, stopped, and found again.",
    "deployment.server": "The server's side of a deployment, and the hand-over of its model.",
    "deployment.site": "A site's side of a deployment: it answers each question once, and takes up what it left behind.",
    "deployment.site_evaluation": "What a site answers beside training: evaluations, personal models, progress, and the replies it keeps.",
    "deployment.flower.server_process": "Flower's server as a process of its own: control, database, and the app.",
    "deployment.flower.site_process": "A site's process under Flower: its gate, its runtime, and its worker.",
    "deployment.flower.requests": "Requests to sites that are under way, and the inbox for their replies.",
    "report.charts": "The charts of one run: its figures and its budgets.",
    "report.comparable": "When two runs may be compared: plans in canonical form, and where they differ.",
    "report.compared_runs": "The runs of a comparison as read, and what trying several of them costs.",
    "report.comparison": "The table of compared runs: cells, effort, and bytes until a target is reached.",
    "report.convergence": "The papers' rates beside what a run did: its facts, its rate bounds, its bytes.",
    "report.evaluations": "Audits and evaluations of a run, as its page shows them.",
    "report.export": "A run's statement for others: its facts, and an entry of the registry of deployments.",
    "report.model_card": "A run as a model card, and as a summary in JSON.",
    "report.page": "The page of one run, and how the run can be repeated.",
    "report.run_files": "A run's folder as it is read for the report.",
    "report.tradeoffs": "Old and exact composition side by side, and the table of trade-offs they give.",
    "studies.compare": "Several plans on the same data, partition, seeds and budgets, side by side.",
    "studies.pool": "Runs in processes of their own or in this one, and the plans of a sweep.",
    "studies.recommend": "What to choose for a budget, from public numbers alone, and why.",
    "studies.circumstances": "The public circumstances of a recommendation: records, sites, and the noise they allow.",
    "studies.audit.attacks": "The attacks: many runs, one run with many canaries, membership.",
    "studies.audit.noise": "Tests of the noise's level and of the sampling, on releases alone.",
    "studies.audit.target": "What an audit attacks: a plan's oracle with a canary, and what an attacker sees.",
    "studies.papers.fedfdp": "FedFDP's theory: its bound on convergence, and the parameters that it recommends.",
    "studies.papers.fedproxvr": "FedProxVR's parameters: what `fedpact tune` says of them, and their figure.",
    "studies.papers.proxvr_search": "FedProxVR's bound on convergence, and a certified search for its best parameters.",
    "studies.papers.measure": "Measure a problem's constants: smoothness, curvature, variance.",
}

# (old module, old name) -> new name, where two modules of one file have a name for two things.
RENAMES = {}
# Whole symbols that change their module before the merge: (old module, name) -> old module.
