CREATE TABLE "outbox_lease" (
    "name" varchar(64) NOT NULL PRIMARY KEY,
    "locked_by" varchar(128) NULL,
    "locked_until" datetime NULL,
    "state" text NULL
);

CREATE TABLE "outbox_worker" (
    "id" varchar(128) NOT NULL PRIMARY KEY,
    "hostname" varchar(255) NOT NULL,
    "pid" integer NOT NULL,
    "started_at" datetime NOT NULL,
    "heartbeat_at" datetime NOT NULL,
    "info" text NULL
);

CREATE TABLE "outbox_event" (
    "id" varchar(49) NOT NULL PRIMARY KEY,
    "event_id" varchar(36) NOT NULL,
    "listener" varchar(255) NULL,
    "routes" text NULL,
    "event_type" varchar(128) NOT NULL,
    "aggregate_type" varchar(64) DEFAULT '__GLOBAL__' NOT NULL,
    "aggregate_id" varchar(128) NULL,
    "tenant_id" varchar(64) NULL,
    "payload" text NOT NULL,
    "headers" text NULL,
    "status" smallint DEFAULT 0 NOT NULL,
    "attempts" integer DEFAULT 0 NOT NULL,
    "rescues" smallint DEFAULT 0 NOT NULL,
    "occurred_at" datetime NOT NULL,
    "created_at" datetime NOT NULL,
    "deliver_at" datetime NULL,
    "first_due_at" datetime NULL,
    "available_at" datetime NULL,
    "done_at" datetime NULL,
    "last_error" text NULL,
    "cause" varchar(200) NULL,
    "history" text NULL,
    "result" text NULL,
    "locked_by" varchar(128) NULL,
    "locked_at" datetime NULL,
    "key" varchar(255) NULL,
    "stream" varchar(320) NULL,
    "seq" bigint NULL,
    "unique_key" varchar(255) NULL,
    "queue" varchar(64) DEFAULT 'default' NOT NULL
);

CREATE TABLE "outbox_inbox" (
    "id" integer NOT NULL PRIMARY KEY AUTOINCREMENT,
    "source" varchar(128) NOT NULL,
    "message_id" varchar(255) NOT NULL,
    "received_at" datetime NOT NULL,
    CONSTRAINT "outbox_inbox_once_cdb4ee2a" UNIQUE ("source", "message_id")
);

CREATE TABLE "outbox_operation" (
    "id" integer NOT NULL PRIMARY KEY AUTOINCREMENT,
    "kind" varchar(16) NOT NULL,
    "state" varchar(8) NOT NULL,
    "about" text NOT NULL,
    "by" varchar(255) NOT NULL,
    "started_at" datetime NOT NULL,
    "ended_at" datetime NULL,
    "stopped_by" varchar(255) NOT NULL,
    "filters" text NULL,
    "rate" text NULL,
    "limit" integer NULL,
    "matched" integer NULL,
    "done" integer NOT NULL,
    "skipped" integer NOT NULL,
    "after" varchar(49) NOT NULL,
    "next_at" datetime NULL
);

CREATE TABLE "outbox_pause" (
    "id" integer NOT NULL PRIMARY KEY AUTOINCREMENT,
    "kind" varchar(16) NOT NULL,
    "name" varchar(255) NOT NULL,
    "reason" text NOT NULL,
    "paused_at" datetime NOT NULL,
    "paused_by" varchar(255) NOT NULL,
    "until" datetime NULL,
    "pause_seconds" real NULL,
    CONSTRAINT "outbox_pause_once_cdb4ee2a" UNIQUE ("kind", "name")
);

CREATE TABLE "outbox_statistics" (
    "id" integer NOT NULL PRIMARY KEY AUTOINCREMENT,
    "started_at" datetime NOT NULL,
    "owner" varchar(128) NOT NULL,
    "listener" varchar(255) NOT NULL,
    "done" integer NOT NULL,
    "retry" integer NOT NULL,
    "dead" integer NOT NULL,
    "rescued" integer NOT NULL,
    "run_ms" bigint NOT NULL,
    "wait_0" integer NOT NULL,
    "wait_1" integer NOT NULL,
    "wait_2" integer NOT NULL,
    "wait_3" integer NOT NULL,
    "wait_4" integer NOT NULL,
    "wait_5" integer NOT NULL,
    "wait_6" integer NOT NULL,
    "wait_7" integer NOT NULL,
    "wait_8" integer NOT NULL,
    "wait_9" integer NOT NULL,
    "wait_10" integer NOT NULL,
    "wait_11" integer NOT NULL,
    "wait_12" integer NOT NULL,
    "wait_13" integer NOT NULL,
    "wait_14" integer NOT NULL,
    "wait_15" integer NOT NULL,
    "wait_16" integer NOT NULL,
    "run_0" integer NOT NULL,
    "run_1" integer NOT NULL,
    "run_2" integer NOT NULL,
    "run_3" integer NOT NULL,
    "run_4" integer NOT NULL,
    "run_5" integer NOT NULL,
    "run_6" integer NOT NULL,
    "run_7" integer NOT NULL,
    "run_8" integer NOT NULL,
    "run_9" integer NOT NULL,
    "run_10" integer NOT NULL,
    "run_11" integer NOT NULL,
    "run_12" integer NOT NULL,
    "run_13" integer NOT NULL,
    "run_14" integer NOT NULL,
    "run_15" integer NOT NULL,
    "run_16" integer NOT NULL,
    CONSTRAINT "outbox_stats_once_cdb4ee2a" UNIQUE ("owner", "started_at", "listener")
);

CREATE TABLE "outbox_stream" (
    "stream" varchar(320) NOT NULL PRIMARY KEY,
    "key" varchar(255) NOT NULL,
    "lane" varchar(64) DEFAULT '' NOT NULL,
    "seq" bigint NOT NULL,
    "due_at" datetime NULL,
    "rescues" smallint DEFAULT 0 NOT NULL,
    "locked_by" varchar(128) NULL,
    "locked_at" datetime NULL,
    "queue" varchar(64) DEFAULT 'default' NOT NULL
);

CREATE INDEX "outbox_event_queue_cdb4ee2a" ON "outbox_event" ("queue", "available_at", "id") WHERE "available_at" IS NOT NULL;

SELECT 1;

CREATE INDEX "outbox_event_stream_cdb4ee2a" ON "outbox_event" ("stream", "seq") WHERE ("status" IN (0, 2, 3) AND "stream" IS NOT NULL);

CREATE UNIQUE INDEX "outbox_event_unique_cdb4ee2a" ON "outbox_event" ("unique_key") WHERE "unique_key" IS NOT NULL;

CREATE INDEX "outbox_event_dead_cdb4ee2a" ON "outbox_event" ("id") WHERE "status" = 3;

CREATE INDEX "outbox_event_lost_cdb4ee2a" ON "outbox_event" ("id") WHERE "rescues" >= 1;

CREATE INDEX "outbox_operation_open_cdb4ee2a" ON "outbox_operation" ("state");

CREATE INDEX "outbox_operation_time_cdb4ee2a" ON "outbox_operation" ("started_at");

CREATE INDEX "outbox_stats_time_cdb4ee2a" ON "outbox_statistics" ("started_at");

CREATE INDEX "outbox_stream_queue_cdb4ee2a" ON "outbox_stream" ("queue", "due_at") WHERE "due_at" IS NOT NULL;

SELECT 1;
