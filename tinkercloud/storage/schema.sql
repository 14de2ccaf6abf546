-- One file, `data_dir/tinkercloud.db`. Times are seconds since the epoch (REAL), JSON is TEXT.
-- What changes here needs a numbered change in database_file.py: it brings existing files there.
-- Every row that belongs to somebody carries `user`; queries without it are maintenance only.

CREATE TABLE IF NOT EXISTS keys (
    key_id      TEXT PRIMARY KEY,
    user        TEXT NOT NULL,
    sha256      BLOB NOT NULL UNIQUE,
    created_at  REAL NOT NULL,
    role        TEXT NOT NULL DEFAULT 'user',  -- "admin" | "user" | "read-only"
    quota       TEXT NOT NULL DEFAULT '{}'     -- the limits that there are: {"models", "queued", ...}
);

CREATE TABLE IF NOT EXISTS key_labels (
    key_id  TEXT PRIMARY KEY,
    name    TEXT NOT NULL,
    note    TEXT NOT NULL
);

CREATE TABLE IF NOT EXISTS sessions (
    session_id     TEXT PRIMARY KEY,
    user           TEXT NOT NULL,
    created_at     REAL NOT NULL,
    heartbeat_at   REAL NOT NULL,
    finished_at    REAL,
    finish_reason  TEXT,
    details        TEXT NOT NULL          -- {"tags", "user_metadata", "project_id", "display_name"}
);
CREATE INDEX IF NOT EXISTS sessions_by_user ON sessions (user, created_at);

CREATE TABLE IF NOT EXISTS models (
    model_id         TEXT PRIMARY KEY,    -- "{session_id}:train:{model_seq_id}"
    user             TEXT NOT NULL,
    session_id       TEXT NOT NULL,
    base_model       TEXT NOT NULL,
    lora             TEXT NOT NULL,       -- {"rank", "seed", "train_attn", "train_mlp", "train_unembed"}
    user_metadata    TEXT NOT NULL,       -- string -> string
    created_at       REAL NOT NULL,
    last_request_at  REAL NOT NULL,
    state            TEXT NOT NULL        -- "live" | "failed" | "deleted" | "archive"
);
CREATE INDEX IF NOT EXISTS models_by_user ON models (user, created_at);
CREATE INDEX IF NOT EXISTS models_by_session ON models (session_id);

CREATE TABLE IF NOT EXISTS checkpoints (
    model_id       TEXT NOT NULL,
    segment        TEXT NOT NULL,         -- "weights" | "sampler_weights" | "external_weights"
    name           TEXT NOT NULL,
    user           TEXT NOT NULL,
    directory      TEXT NOT NULL UNIQUE,  -- relative to data_dir; a new one at every overwrite
    base_model     TEXT NOT NULL,
    lora           TEXT NOT NULL,
    with_optimizer INTEGER NOT NULL,
    size_bytes     INTEGER NOT NULL,
    user_metadata  TEXT NOT NULL,
    created_at     REAL NOT NULL,
    expires_at     REAL,
    request_id     TEXT,                  -- of the operation that saved it
    PRIMARY KEY (model_id, segment, name)
);
CREATE INDEX IF NOT EXISTS checkpoints_by_user ON checkpoints (user, created_at);

CREATE TABLE IF NOT EXISTS published (   -- checkpoints that every user may read
    directory    TEXT PRIMARY KEY,        -- of the checkpoint; what replaces it is private again
    published_at REAL NOT NULL
);

CREATE TABLE IF NOT EXISTS secrets (
    name   TEXT PRIMARY KEY,              -- what it is for
    value  BLOB NOT NULL
);

CREATE TABLE IF NOT EXISTS samplers (
    sampler_id  TEXT PRIMARY KEY,
    user        TEXT NOT NULL,
    session_id  TEXT NOT NULL,
    kind        TEXT NOT NULL,            -- "base" | "checkpoint" | "snapshot" | "inflight"
    base_model  TEXT NOT NULL,
    model_id    TEXT,                     -- snapshot, inflight: whose weights
    model_path  TEXT,                     -- checkpoint: as the client named it
    directory   TEXT,                     -- checkpoint: what that name meant at creation
    created_at  REAL NOT NULL,
    request_id  TEXT                      -- snapshot, inflight: of the operation that made it
);
CREATE INDEX IF NOT EXISTS samplers_by_session ON samplers (session_id);
CREATE INDEX IF NOT EXISTS samplers_by_request ON samplers (request_id)
    WHERE request_id IS NOT NULL;

CREATE TABLE IF NOT EXISTS futures (
    request_id   TEXT PRIMARY KEY,
    user         TEXT NOT NULL,
    kind         TEXT NOT NULL,           -- "ForwardBackward", "OptimStep", "Sample", ...
    dedup_key    TEXT UNIQUE,             -- what makes a repeated request the same request
    model_id     TEXT,
    seq_id       INTEGER,
    status       TEXT NOT NULL,           -- "pending" | "completed" | "failed"
    content_type TEXT,
    body         BLOB,                    -- the result; a failure is {"error", "category"}
    created_at   REAL NOT NULL,
    finished_at  REAL,
    sampler_id   TEXT,                    -- of a sample
    started_at   REAL,                    -- when its work began
    request      BLOB,                    -- what it asks for, until it ends: to begin again after a restart;
                                          -- of a sample that succeeded as long as its result
    digest       BLOB                     -- of what it asks for, with dedup_key: SHA-256
);
CREATE INDEX IF NOT EXISTS futures_by_sampler ON futures (sampler_id, finished_at)
    WHERE sampler_id IS NOT NULL;
CREATE INDEX IF NOT EXISTS futures_by_finish ON futures (finished_at);
CREATE INDEX IF NOT EXISTS futures_by_model ON futures (model_id, seq_id);

-- What has been asked of models in training, to be done again after a crash (storage/journal.py) and
-- by whoever replays a run (storage/archive.py).
CREATE TABLE IF NOT EXISTS operations (
    request_id  TEXT PRIMARY KEY,
    user        TEXT NOT NULL,
    model_id    TEXT NOT NULL,
    kind        TEXT NOT NULL,
    seq_id      INTEGER NOT NULL,
    request     BLOB NOT NULL,            -- with everything resolved (core/operation_codec.py)
    position    INTEGER,                  -- the how-manieth of its model's; NULL: it has not run
    applied     INTEGER NOT NULL DEFAULT 0,   -- whether the model is another by it
    digest      BLOB,                     -- of what it computed
    took_s      REAL NOT NULL DEFAULT 0,
    ran_at      REAL
);
CREATE INDEX IF NOT EXISTS operations_by_model ON operations (model_id, position);

CREATE TABLE IF NOT EXISTS snapshots (    -- the whole state of a model in training
    directory   TEXT PRIMARY KEY,         -- relative to data_dir
    user        TEXT NOT NULL,
    model_id    TEXT NOT NULL,
    position    INTEGER NOT NULL,         -- of the last operation in it
    num_bytes   INTEGER NOT NULL,
    created_at  REAL NOT NULL,
    num_steps   INTEGER NOT NULL,         -- steps of the optimizer among the operations so far
    computed_s  REAL NOT NULL             -- seconds that these operations took
);
CREATE INDEX IF NOT EXISTS snapshots_by_model ON snapshots (model_id, position);

CREATE TABLE IF NOT EXISTS kept_versions (    -- published weights of models in training, as files
    version_key TEXT PRIMARY KEY,         -- of VersionStore
    user        TEXT NOT NULL,
    model_id    TEXT NOT NULL,
    directory   TEXT NOT NULL             -- relative to data_dir
);
CREATE INDEX IF NOT EXISTS kept_versions_by_model ON kept_versions (model_id);

CREATE TABLE IF NOT EXISTS runs (         -- models in training that anything above is kept of
    model_id      TEXT PRIMARY KEY,
    user          TEXT NOT NULL,
    inexact_since INTEGER,                -- number of steps after which its bits are of no single class
    ended_at      REAL                    -- the model is no more: kept for its replay only
);

CREATE TABLE IF NOT EXISTS numerics (     -- what computed the operations of a run
    model_id  TEXT NOT NULL,
    position  INTEGER NOT NULL,           -- those after this one, up to the next row's
    class     TEXT NOT NULL,              -- Backend.numerics()
    PRIMARY KEY (model_id, position)
) WITHOUT ROWID;

-- What training scripts say of their runs: rewards above all, which the server cannot know.
CREATE TABLE IF NOT EXISTS reported_metrics (
    model_id     TEXT NOT NULL,
    step         INTEGER NOT NULL,        -- as the script counts
    user         TEXT NOT NULL,
    number       INTEGER NOT NULL,        -- of its last change, among those of the run
    metrics      TEXT NOT NULL,           -- string -> number
    reported_at  REAL NOT NULL,
    PRIMARY KEY (model_id, step)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS reported_metrics_by_number ON reported_metrics (model_id, number);
CREATE INDEX IF NOT EXISTS reported_metrics_by_user ON reported_metrics (user);
CREATE INDEX IF NOT EXISTS reported_metrics_by_time ON reported_metrics (reported_at);

CREATE TABLE IF NOT EXISTS sampler_clients (
    sampler_id   TEXT PRIMARY KEY,
    user         TEXT NOT NULL,
    num_joined   INTEGER NOT NULL         -- clients apart from the first; numbers are never reused
);

-- What samples with record_stability_info leave for training on them. Its sequences go with a sample.
CREATE TABLE IF NOT EXISTS recorded_samples (
    request_id   TEXT PRIMARY KEY,
    user         TEXT NOT NULL,
    session_id   TEXT NOT NULL,           -- the only one that may train on it
    sampler_id   TEXT NOT NULL,           -- whose weights drew the tokens
    temperature  REAL NOT NULL,
    top_k        INTEGER NOT NULL,
    top_p        REAL NOT NULL,
    prompt       BLOB NOT NULL,           -- int32, little-endian
    num_bytes    INTEGER NOT NULL,        -- of the prompt and all sequences
    created_at   REAL NOT NULL,
    used_at      REAL NOT NULL
);
CREATE INDEX IF NOT EXISTS recorded_samples_by_user ON recorded_samples (user, used_at);
CREATE INDEX IF NOT EXISTS recorded_samples_by_session ON recorded_samples (session_id);
CREATE INDEX IF NOT EXISTS recorded_samples_by_use ON recorded_samples (used_at);

CREATE TABLE IF NOT EXISTS recorded_sequences (
    sequence_id  TEXT PRIMARY KEY,        -- "{request_id}:{index}"
    request_id   TEXT NOT NULL,
    tokens       BLOB NOT NULL,           -- int32, little-endian, the stop token included
    logprobs     BLOB NOT NULL            -- float32 of each: under the distribution it was drawn from
);
CREATE INDEX IF NOT EXISTS recorded_sequences_by_request ON recorded_sequences (request_id);

CREATE TRIGGER IF NOT EXISTS recorded_sequences_follow AFTER DELETE ON recorded_samples BEGIN
    DELETE FROM recorded_sequences WHERE request_id = OLD.request_id;
END;

CREATE TABLE IF NOT EXISTS token_usage (
    hour        INTEGER NOT NULL,         -- its first second since the epoch
    user        TEXT NOT NULL,
    session_id  TEXT NOT NULL,            -- "" where a request had none
    base_model  TEXT NOT NULL,
    kind        TEXT NOT NULL,            -- "training" | "prefill" | "cached_prefill" | "sample"
    num_tokens  INTEGER NOT NULL,
    PRIMARY KEY (user, hour, session_id, base_model, kind)
) WITHOUT ROWID;

-- Every checkpoint that was ever kept, for the accounts of storage. Triggers, so that no way of
-- making or removing one is forgotten; a replacement is an insert, its delete fires no trigger.
CREATE TABLE IF NOT EXISTS storage_periods (
    directory   TEXT PRIMARY KEY,
    user        TEXT NOT NULL,
    model_id    TEXT NOT NULL,
    segment     TEXT NOT NULL,
    name        TEXT NOT NULL,
    base_model  TEXT NOT NULL,
    size_bytes  INTEGER NOT NULL,
    began_at    REAL NOT NULL,
    ended_at    REAL
);
CREATE INDEX IF NOT EXISTS storage_periods_by_user ON storage_periods (user, began_at);
CREATE INDEX IF NOT EXISTS storage_periods_by_name ON storage_periods (model_id, segment, name);
CREATE TRIGGER IF NOT EXISTS storage_begins AFTER INSERT ON checkpoints BEGIN
    UPDATE storage_periods SET ended_at = (julianday('now') - 2440587.5) * 86400.0
        WHERE model_id = NEW.model_id AND segment = NEW.segment AND name = NEW.name
        AND directory != NEW.directory AND ended_at IS NULL;
    INSERT OR REPLACE INTO storage_periods VALUES (NEW.directory, NEW.user, NEW.model_id,
        NEW.segment, NEW.name, NEW.base_model, NEW.size_bytes,
        (julianday('now') - 2440587.5) * 86400.0, NULL);
END;
CREATE TRIGGER IF NOT EXISTS storage_ends AFTER DELETE ON checkpoints BEGIN
    UPDATE storage_periods SET ended_at = (julianday('now') - 2440587.5) * 86400.0
        WHERE directory = OLD.directory;
END;
INSERT OR IGNORE INTO storage_periods   -- what a server without this table saved
    SELECT directory, user, model_id, segment, name, base_model, size_bytes, created_at, NULL
    FROM checkpoints;

CREATE TABLE IF NOT EXISTS custom_losses (
    loss_id     TEXT PRIMARY KEY,         -- "{session_id}:loss:{custom_loss_seq_id}"
    user        TEXT NOT NULL,
    session_id  TEXT NOT NULL,            -- whose models alone may train with it
    body        TEXT NOT NULL,            -- JSON: name, inputs, graph
    created_at  REAL NOT NULL
);
CREATE INDEX IF NOT EXISTS custom_losses_by_session ON custom_losses (session_id);

CREATE TABLE IF NOT EXISTS audit_log (
    entry_id  INTEGER PRIMARY KEY,
    at        REAL NOT NULL,
    user      TEXT NOT NULL,              -- whose resource it is; the actor is in the details
    resource  TEXT NOT NULL,              -- "checkpoints" | "projects" | "organizations"
    event     TEXT NOT NULL,              -- "checkpoint_saved", ...
    details   TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS audit_log_by_user ON audit_log (user, at);

-- Capture sessions: what agents sampled, kept for training on it. Turns, samples, rewards go with one.
CREATE TABLE IF NOT EXISTS captures (
    capture_id   TEXT PRIMARY KEY,
    user         TEXT NOT NULL,
    details      TEXT NOT NULL,           -- {"model" | "follow", "group", "metadata", "webhook", ...}
    ttl_s        REAL NOT NULL,           -- kept so long after its last use
    created_at   REAL NOT NULL,
    used_at      REAL NOT NULL,
    closed_at    REAL,
    num_turns    INTEGER NOT NULL DEFAULT 0,
    num_bytes    INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX IF NOT EXISTS captures_by_user ON captures (user, created_at);

CREATE TABLE IF NOT EXISTS capture_turns (
    turn_id       TEXT PRIMARY KEY,       -- the id of the answer that the agent got
    capture_id    TEXT NOT NULL,
    user          TEXT NOT NULL,
    parent_turn   TEXT,                   -- the sample that this turn's prompt goes on from
    parent_index  INTEGER,
    group_label   TEXT,
    episode       TEXT,
    digest        TEXT NOT NULL,          -- of the conversation that was answered
    prompt        BLOB NOT NULL,          -- int32, little-endian: what follows the parent's tokens
    messages      TEXT NOT NULL,          -- JSON: those that follow the parent's answer
    details       TEXT NOT NULL,          -- {"model", "weights", "params", "tools"}
    num_bytes     INTEGER NOT NULL,
    created_at    REAL NOT NULL
);
CREATE INDEX IF NOT EXISTS capture_turns_by_capture ON capture_turns (capture_id, created_at);

CREATE TABLE IF NOT EXISTS capture_samples (   -- written before their turn: without it they are not seen
    turn_id       TEXT NOT NULL,
    sample_index  INTEGER NOT NULL,
    capture_id    TEXT NOT NULL,
    digest        TEXT NOT NULL,          -- of the conversation with this answer
    tokens        BLOB NOT NULL,          -- int32, little-endian, the stop token included
    logprobs      BLOB NOT NULL,          -- float32 of each: under the distribution it was drawn from
    finish_reason TEXT NOT NULL,
    message       TEXT NOT NULL,          -- JSON: the assistant's, as the agent got it
    PRIMARY KEY (turn_id, sample_index)
);
CREATE INDEX IF NOT EXISTS capture_samples_by_digest ON capture_samples (capture_id, digest);

CREATE TABLE IF NOT EXISTS capture_rewards (
    capture_id   TEXT NOT NULL,
    target       TEXT NOT NULL,           -- "capture" | "episode:..." | "trajectory:..." | "turn:..."
    key          TEXT NOT NULL,           -- the same one replaces, other ones add
    value        REAL NOT NULL,
    created_at   REAL NOT NULL,
    PRIMARY KEY (capture_id, target, key)
);

CREATE TABLE IF NOT EXISTS capture_closings (
    capture_id   TEXT NOT NULL,
    episode      TEXT NOT NULL,           -- '' for turns without one
    closed_at    REAL NOT NULL,
    PRIMARY KEY (capture_id, episode)
);

CREATE TABLE IF NOT EXISTS capture_deliveries (   -- questions for rewards to a session's webhook
    capture_id     TEXT NOT NULL,
    trajectory_id  TEXT NOT NULL,
    attempts       INTEGER NOT NULL,
    next_at        REAL,                  -- NULL: answered, or given up
    error          TEXT,
    PRIMARY KEY (capture_id, trajectory_id)
);

CREATE TRIGGER IF NOT EXISTS captured_follows AFTER DELETE ON captures BEGIN
    DELETE FROM capture_turns WHERE capture_id = OLD.capture_id;
    DELETE FROM capture_samples WHERE capture_id = OLD.capture_id;
    DELETE FROM capture_rewards WHERE capture_id = OLD.capture_id;
    DELETE FROM capture_closings WHERE capture_id = OLD.capture_id;
    DELETE FROM capture_deliveries WHERE capture_id = OLD.capture_id;
END;
