BEGIN TRANSACTION;
CREATE TABLE audit_log (
    entry_id  INTEGER PRIMARY KEY,
    at        REAL NOT NULL,
    user      TEXT NOT NULL,              -- whose resource it is; the actor is in the details
    resource  TEXT NOT NULL,              -- "checkpoints" | "projects" | "organizations"
    event     TEXT NOT NULL,              -- "checkpoint_saved", ...
    details   TEXT NOT NULL
);
INSERT INTO "audit_log" VALUES(1,1.79546710765122413634e+09,'ann','organizations','api_key_created','{"actor": "operator", "key_id": "key-ad1b3a2b"}');
INSERT INTO "audit_log" VALUES(2,1.79546710765389561656e+09,'bob','organizations','api_key_created','{"actor": "operator", "key_id": "key-3dea92c1"}');
INSERT INTO "audit_log" VALUES(3,1.79546710773431611061e+09,'ann','checkpoints','checkpoint_saved','{"actor": "ann", "tinker_path": "tinker://3b0eb217-5ae2-4875-b03b-f2390fd0a968:train:0/weights/state", "size_bytes": 385597, "replaced": false}');
INSERT INTO "audit_log" VALUES(4,1.79546710774602317813e+09,'ann','checkpoints','checkpoint_saved','{"actor": "ann", "tinker_path": "tinker://3b0eb217-5ae2-4875-b03b-f2390fd0a968:train:0/sampler_weights/sampler", "size_bytes": 129112, "replaced": false}');
INSERT INTO "audit_log" VALUES(5,1.7954671077523143292e+09,'ann','checkpoints','checkpoint_published','{"actor": "ann", "tinker_path": "tinker://3b0eb217-5ae2-4875-b03b-f2390fd0a968:train:0/sampler_weights/sampler"}');
CREATE TABLE capture_closings (
    capture_id   TEXT NOT NULL,
    episode      TEXT NOT NULL,           -- '' for turns without one
    closed_at    REAL NOT NULL,
    PRIMARY KEY (capture_id, episode)
);
CREATE TABLE capture_deliveries (   -- questions for rewards to a session's webhook
    capture_id     TEXT NOT NULL,
    trajectory_id  TEXT NOT NULL,
    attempts       INTEGER NOT NULL,
    next_at        REAL,                  -- NULL: answered, or given up
    error          TEXT,
    PRIMARY KEY (capture_id, trajectory_id)
);
CREATE TABLE capture_rewards (
    capture_id   TEXT NOT NULL,
    target       TEXT NOT NULL,           -- "capture" | "episode:..." | "trajectory:..." | "turn:..."
    key          TEXT NOT NULL,           -- the same one replaces, other ones add
    value        REAL NOT NULL,
    created_at   REAL NOT NULL,
    PRIMARY KEY (capture_id, target, key)
);
CREATE TABLE capture_samples (   -- written before their turn: without it they are not seen
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
CREATE TABLE capture_turns (
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
CREATE TABLE captures (
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
INSERT INTO "captures" VALUES('cap-ca0fcb985bdf42668ee634d0805147df','ann','{"model": "fake/tiny", "group": null, "metadata": {}}',86400.0,1.79546710775501775739e+09,1.79546710775501775739e+09,NULL,0,0);
CREATE TABLE checkpoints (
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
    expires_at     REAL, request_id TEXT,
    PRIMARY KEY (model_id, segment, name)
);
INSERT INTO "checkpoints" VALUES('3b0eb217-5ae2-4875-b03b-f2390fd0a968:train:0','weights','state','ann','checkpoints/3b0eb217-5ae2-4875-b03b-f2390fd0a968:train:0/weights/state/1220611e0e1e','fake/tiny','{"rank": 32, "seed": 3372751516148251619, "train_attn": true, "train_mlp": true, "train_unembed": true}',1,385597,'{}',1.79546710769449615477e+09,NULL,NULL);
INSERT INTO "checkpoints" VALUES('3b0eb217-5ae2-4875-b03b-f2390fd0a968:train:0','sampler_weights','sampler','ann','checkpoints/3b0eb217-5ae2-4875-b03b-f2390fd0a968:train:0/sampler_weights/sampler/0f2cde14a008','fake/tiny','{"rank": 32, "seed": 3372751516148251619, "train_attn": true, "train_mlp": true, "train_unembed": true}',0,129112,'{}',1.79546710773674964901e+09,NULL,NULL);
CREATE TABLE custom_losses (
    loss_id     TEXT PRIMARY KEY,         -- "{session_id}:loss:{custom_loss_seq_id}"
    user        TEXT NOT NULL,
    session_id  TEXT NOT NULL,            -- whose models alone may train with it
    body        TEXT NOT NULL,            -- JSON: name, inputs, graph
    created_at  REAL NOT NULL
);
CREATE TABLE futures (
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
    started_at   REAL                     -- when its work began
, request BLOB, digest BLOB);
INSERT INTO "futures" VALUES('train-85e8b1cb382844d1b6cc1d36e239073b','ann','CreateModel','create|ann|3b0eb217-5ae2-4875-b03b-f2390fd0a968:train:0','3b0eb217-5ae2-4875-b03b-f2390fd0a968:train:0',0,'completed','application/json',X'7B226D6F64656C5F6964223A202233623065623231372D356165322D343837352D623033622D6632333930666430613936383A747261696E3A30222C202274797065223A20226372656174655F6D6F64656C227D',1.79546710768865346906e+09,1.7954671076896071434e+09,NULL,1.7954671076890203953e+09,NULL,NULL);
INSERT INTO "futures" VALUES('train-195823f0f10943a88262fe92c9058fe5','ann','ForwardBackward','train|ann|3b0eb217-5ae2-4875-b03b-f2390fd0a968:train:0|1','3b0eb217-5ae2-4875-b03b-f2390fd0a968:train:0',1,'completed','application/x-protobuf',X'0A0B41727261795265636F72641272123A0A10656C656D656E74776973655F6C6F737312260A101680C5407F4B604117815F4105072541121000000000000000001000000000000000180112320A086C6F6770726F627312260A101680C5C07F4B60C117815FC1050725C1121000000000000000001000000000000000180118011A130A086C6F73733A73756D1196416B329D3C4640',1.79546710769055151936e+09,1.79546710769173097606e+09,NULL,1.79546710769085264202e+09,NULL,NULL);
INSERT INTO "futures" VALUES('train-cbe9e7890ac84e8d94608254b6ea689c','ann','OptimStep','train|ann|3b0eb217-5ae2-4875-b03b-f2390fd0a968:train:0|2','3b0eb217-5ae2-4875-b03b-f2390fd0a968:train:0',2,'completed','application/json',X'7B226D657472696373223A207B22756E636C69707065645F677261645F6C323A6D65616E223A20322E303332333132333435333235333733377D2C202274797065223A20226F7074696D5F73746570227D',1.79546710769243597983e+09,1.79546710769336843489e+09,NULL,1.79546710769260501857e+09,NULL,NULL);
INSERT INTO "futures" VALUES('train-95e03af7e7884ee9bc98d9aaccd1f5b8','ann','SaveWeights','train|ann|3b0eb217-5ae2-4875-b03b-f2390fd0a968:train:0|3','3b0eb217-5ae2-4875-b03b-f2390fd0a968:train:0',3,'completed','application/json',X'7B2270617468223A202274696E6B65723A2F2F33623065623231372D356165322D343837352D623033622D6632333930666430613936383A747261696E3A302F776569676874732F7374617465222C202274797065223A2022736176655F77656967687473227D',1.79546710769390392304e+09,1.79546710773484039305e+09,NULL,1.79546710769404125216e+09,NULL,NULL);
INSERT INTO "futures" VALUES('train-cb2eeddae5de46e28b1bd689733f1731','ann','SaveWeightsForSampler','train|ann|3b0eb217-5ae2-4875-b03b-f2390fd0a968:train:0|4','3b0eb217-5ae2-4875-b03b-f2390fd0a968:train:0',4,'completed','application/json',X'7B2274797065223A2022736176655F776569676874735F666F725F73616D706C6572222C202270617468223A202274696E6B65723A2F2F33623065623231372D356165322D343837352D623033622D6632333930666430613936383A747261696E3A302F73616D706C65725F776569676874732F73616D706C6572227D',1.79546710773585700988e+09,1.79546710774641776081e+09,NULL,1795467107.73605,NULL,NULL);
INSERT INTO "futures" VALUES('sample-46b21f4cdd6d4aabbeefb7776438325c','ann','Sample',NULL,NULL,NULL,'completed','application/x-protobuf',X'0A1E0801120C03010000A60100009B0300001A0C56D61EC03C52E7BFD6E5B0C0',1.79546710774807071692e+09,1.7954671077499334812e+09,'3b0eb217-5ae2-4875-b03b-f2390fd0a968:sample:0',1.7954671077485647202e+09,NULL,NULL);
CREATE TABLE kept_versions (    -- published weights of models in training, as files
    version_key TEXT PRIMARY KEY,         -- of VersionStore
    user        TEXT NOT NULL,
    model_id    TEXT NOT NULL,
    directory   TEXT NOT NULL             -- relative to data_dir
);
CREATE TABLE key_labels (
    key_id  TEXT PRIMARY KEY,
    name    TEXT NOT NULL,
    note    TEXT NOT NULL
);
CREATE TABLE keys (
    key_id      TEXT PRIMARY KEY,
    user        TEXT NOT NULL,
    sha256      BLOB NOT NULL UNIQUE,
    created_at  REAL NOT NULL
, role TEXT NOT NULL DEFAULT 'user', quota TEXT NOT NULL DEFAULT '{}');
INSERT INTO "keys" VALUES('key-ad1b3a2b','ann',X'6B65792D6164316233613262',1.79546710765120172501e+09,'admin','{}');
INSERT INTO "keys" VALUES('key-3dea92c1','bob',X'6B65792D3364656139326331',1.79546710765387272827e+09,'user','{}');
CREATE TABLE models (
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
INSERT INTO "models" VALUES('3b0eb217-5ae2-4875-b03b-f2390fd0a968:train:0','ann','3b0eb217-5ae2-4875-b03b-f2390fd0a968','fake/tiny','{"rank": 32, "seed": 3372751516148251619, "train_attn": true, "train_mlp": true, "train_unembed": true}','{}',1.79546710768783617014e+09,1.79546710769173979756e+09,'live');
CREATE TABLE numerics (     -- what computed the operations of a run
    model_id  TEXT NOT NULL,
    position  INTEGER NOT NULL,           -- those after this one, up to the next row's
    class     TEXT NOT NULL,              -- Backend.numerics()
    PRIMARY KEY (model_id, position)
) WITHOUT ROWID;
CREATE TABLE operations (
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
CREATE TABLE published (   -- checkpoints that every user may read
    directory    TEXT PRIMARY KEY,        -- of the checkpoint; what replaces it is private again
    published_at REAL NOT NULL
);
INSERT INTO "published" VALUES('checkpoints/3b0eb217-5ae2-4875-b03b-f2390fd0a968:train:0/sampler_weights/sampler/0f2cde14a008',1.79546710775126910214e+09);
CREATE TABLE recorded_samples (
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
INSERT INTO "recorded_samples" VALUES('sample-46b21f4cdd6d4aabbeefb7776438325c','ann','3b0eb217-5ae2-4875-b03b-f2390fd0a968','3b0eb217-5ae2-4875-b03b-f2390fd0a968:sample:0',1.0,-1,1.0,X'010000000200000003000000',36,1.7954671077495744228e+09,1.7954671077495744228e+09);
CREATE TABLE recorded_sequences (
    sequence_id  TEXT PRIMARY KEY,        -- "{request_id}:{index}"
    request_id   TEXT NOT NULL,
    tokens       BLOB NOT NULL,           -- int32, little-endian, the stop token included
    logprobs     BLOB NOT NULL            -- float32 of each: under the distribution it was drawn from
);
INSERT INTO "recorded_sequences" VALUES('sample-46b21f4cdd6d4aabbeefb7776438325c:0','sample-46b21f4cdd6d4aabbeefb7776438325c',X'03010000A60100009B030000',X'56D61EC03C52E7BFD6E5B0C0');
CREATE TABLE runs (         -- models in training that anything above is kept of
    model_id      TEXT PRIMARY KEY,
    user          TEXT NOT NULL,
    inexact_since INTEGER,                -- number of steps after which its bits are of no single class
    ended_at      REAL                    -- the model is no more: kept for its replay only
);
CREATE TABLE sampler_clients (
    sampler_id   TEXT PRIMARY KEY,
    user         TEXT NOT NULL,
    num_joined   INTEGER NOT NULL         -- clients apart from the first; numbers are never reused
);
CREATE TABLE samplers (
    sampler_id  TEXT PRIMARY KEY,
    user        TEXT NOT NULL,
    session_id  TEXT NOT NULL,
    kind        TEXT NOT NULL,            -- "base" | "checkpoint" | "snapshot" | "inflight"
    base_model  TEXT NOT NULL,
    model_id    TEXT,                     -- snapshot, inflight: whose weights
    model_path  TEXT,                     -- checkpoint: as the client named it
    directory   TEXT,                     -- checkpoint: what that name meant at creation
    created_at  REAL NOT NULL
, request_id TEXT);
INSERT INTO "samplers" VALUES('3b0eb217-5ae2-4875-b03b-f2390fd0a968:sample:0','ann','3b0eb217-5ae2-4875-b03b-f2390fd0a968','base','fake/tiny',NULL,NULL,NULL,1.79546710774722695349e+09,NULL);
CREATE TABLE secrets (
    name   TEXT PRIMARY KEY,              -- what it is for
    value  BLOB NOT NULL
);
INSERT INTO "secrets" VALUES('tokens',X'0000000000000000000000000000000000000000000000000000000000000000');
INSERT INTO "secrets" VALUES('signed links',X'0000000000000000000000000000000000000000000000000000000000000000');
CREATE TABLE sessions (
    session_id     TEXT PRIMARY KEY,
    user           TEXT NOT NULL,
    created_at     REAL NOT NULL,
    heartbeat_at   REAL NOT NULL,
    finished_at    REAL,
    finish_reason  TEXT,
    details        TEXT NOT NULL          -- {"tags", "user_metadata", "project_id", "display_name"}
);
INSERT INTO "sessions" VALUES('3b0eb217-5ae2-4875-b03b-f2390fd0a968','ann',1.79546710768644189829e+09,1.79546710768644189829e+09,NULL,NULL,'{"tags": [], "user_metadata": null, "project_id": null, "display_name": null}');
CREATE TABLE snapshots (    -- the whole state of a model in training
    directory   TEXT PRIMARY KEY,         -- relative to data_dir
    user        TEXT NOT NULL,
    model_id    TEXT NOT NULL,
    position    INTEGER NOT NULL,         -- of the last operation in it
    num_bytes   INTEGER NOT NULL,
    created_at  REAL NOT NULL,
    num_steps   INTEGER NOT NULL,         -- steps of the optimizer among the operations so far
    computed_s  REAL NOT NULL             -- seconds that these operations took
);
CREATE TABLE storage_periods (
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
INSERT INTO "storage_periods" VALUES('checkpoints/3b0eb217-5ae2-4875-b03b-f2390fd0a968:train:0/weights/state/1220611e0e1e','ann','3b0eb217-5ae2-4875-b03b-f2390fd0a968:train:0','weights','state','fake/tiny',385597,1.79546710771600747107e+09,NULL);
INSERT INTO "storage_periods" VALUES('checkpoints/3b0eb217-5ae2-4875-b03b-f2390fd0a968:train:0/sampler_weights/sampler/0f2cde14a008','ann','3b0eb217-5ae2-4875-b03b-f2390fd0a968:train:0','sampler_weights','sampler','fake/tiny',129112,1.79546710774501562125e+09,NULL);
CREATE TABLE token_usage (
    hour        INTEGER NOT NULL,         -- its first second since the epoch
    user        TEXT NOT NULL,
    session_id  TEXT NOT NULL,            -- "" where a request had none
    base_model  TEXT NOT NULL,
    kind        TEXT NOT NULL,            -- "training" | "prefill" | "cached_prefill" | "sample"
    num_tokens  INTEGER NOT NULL,
    PRIMARY KEY (user, hour, session_id, base_model, kind)
) WITHOUT ROWID;
INSERT INTO "token_usage" VALUES(1795464000,'ann','3b0eb217-5ae2-4875-b03b-f2390fd0a968','fake/tiny','prefill',3);
INSERT INTO "token_usage" VALUES(1795464000,'ann','3b0eb217-5ae2-4875-b03b-f2390fd0a968','fake/tiny','sample',3);
INSERT INTO "token_usage" VALUES(1795464000,'ann','3b0eb217-5ae2-4875-b03b-f2390fd0a968','fake/tiny','training',4);
CREATE INDEX sessions_by_user ON sessions (user, created_at);
CREATE INDEX models_by_user ON models (user, created_at);
CREATE INDEX models_by_session ON models (session_id);
CREATE INDEX checkpoints_by_user ON checkpoints (user, created_at);
CREATE INDEX samplers_by_session ON samplers (session_id);
CREATE INDEX futures_by_sampler ON futures (sampler_id, finished_at)
    WHERE sampler_id IS NOT NULL;
CREATE INDEX futures_by_finish ON futures (finished_at);
CREATE INDEX futures_by_model ON futures (model_id, seq_id);
CREATE INDEX recorded_samples_by_user ON recorded_samples (user, used_at);
CREATE INDEX recorded_samples_by_session ON recorded_samples (session_id);
CREATE INDEX recorded_samples_by_use ON recorded_samples (used_at);
CREATE INDEX recorded_sequences_by_request ON recorded_sequences (request_id);
CREATE INDEX storage_periods_by_user ON storage_periods (user, began_at);
CREATE INDEX storage_periods_by_name ON storage_periods (model_id, segment, name);
CREATE INDEX custom_losses_by_session ON custom_losses (session_id);
CREATE INDEX audit_log_by_user ON audit_log (user, at);
CREATE INDEX captures_by_user ON captures (user, created_at);
CREATE INDEX capture_turns_by_capture ON capture_turns (capture_id, created_at);
CREATE INDEX capture_samples_by_digest ON capture_samples (capture_id, digest);
CREATE INDEX samplers_by_request ON samplers (request_id)
    WHERE request_id IS NOT NULL;
CREATE INDEX operations_by_model ON operations (model_id, position);
CREATE INDEX snapshots_by_model ON snapshots (model_id, position);
CREATE INDEX kept_versions_by_model ON kept_versions (model_id);
CREATE TRIGGER recorded_sequences_follow AFTER DELETE ON recorded_samples BEGIN
    DELETE FROM recorded_sequences WHERE request_id = OLD.request_id;
END;
CREATE TRIGGER storage_begins AFTER INSERT ON checkpoints BEGIN
    UPDATE storage_periods SET ended_at = (julianday('now') - 2440587.5) * 86400.0
        WHERE model_id = NEW.model_id AND segment = NEW.segment AND name = NEW.name
        AND directory != NEW.directory AND ended_at IS NULL;
    INSERT OR REPLACE INTO storage_periods VALUES (NEW.directory, NEW.user, NEW.model_id,
        NEW.segment, NEW.name, NEW.base_model, NEW.size_bytes,
        (julianday('now') - 2440587.5) * 86400.0, NULL);
END;
CREATE TRIGGER storage_ends AFTER DELETE ON checkpoints BEGIN
    UPDATE storage_periods SET ended_at = (julianday('now') - 2440587.5) * 86400.0
        WHERE directory = OLD.directory;
END;
CREATE TRIGGER captured_follows AFTER DELETE ON captures BEGIN
    DELETE FROM capture_turns WHERE capture_id = OLD.capture_id;
    DELETE FROM capture_samples WHERE capture_id = OLD.capture_id;
    DELETE FROM capture_rewards WHERE capture_id = OLD.capture_id;
    DELETE FROM capture_closings WHERE capture_id = OLD.capture_id;
    DELETE FROM capture_deliveries WHERE capture_id = OLD.capture_id;
END;
COMMIT;
