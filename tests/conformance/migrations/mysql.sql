CREATE TABLE `outbox_lease` (
    `name` character varying(64) COLLATE `utf8mb4_bin` NOT NULL PRIMARY KEY,
    `locked_by` character varying(128) COLLATE `utf8mb4_bin` NULL,
    `locked_until` datetime(6) NULL,
    `state` longtext COLLATE `utf8mb4_bin` NULL
);

CREATE TABLE `outbox_worker` (
    `id` character varying(128) COLLATE `utf8mb4_bin` NOT NULL PRIMARY KEY,
    `hostname` character varying(255) COLLATE `utf8mb4_bin` NOT NULL,
    `pid` integer NOT NULL,
    `started_at` datetime(6) NOT NULL,
    `heartbeat_at` datetime(6) NOT NULL,
    `info` longtext COLLATE `utf8mb4_bin` NULL
);

CREATE TABLE `outbox_event` (
    `id` character varying(49) COLLATE `utf8mb4_bin` NOT NULL PRIMARY KEY,
    `event_id` character varying(36) COLLATE `utf8mb4_bin` NOT NULL,
    `listener` character varying(255) COLLATE `utf8mb4_bin` NULL,
    `routes` longtext COLLATE `utf8mb4_bin` NULL,
    `event_type` character varying(128) COLLATE `utf8mb4_bin` NOT NULL,
    `aggregate_type` character varying(64) COLLATE `utf8mb4_bin` DEFAULT '__GLOBAL__' NOT NULL,
    `aggregate_id` character varying(128) COLLATE `utf8mb4_bin` NULL,
    `tenant_id` character varying(64) COLLATE `utf8mb4_bin` NULL,
    `payload` longtext COLLATE `utf8mb4_bin` NOT NULL,
    `headers` longtext COLLATE `utf8mb4_bin` NULL,
    `status` smallint DEFAULT 0 NOT NULL,
    `attempts` integer DEFAULT 0 NOT NULL,
    `rescues` smallint DEFAULT 0 NOT NULL,
    `occurred_at` datetime(6) NOT NULL,
    `created_at` datetime(6) NOT NULL,
    `deliver_at` datetime(6) NULL,
    `first_due_at` datetime(6) NULL,
    `available_at` datetime(6) NULL,
    `done_at` datetime(6) NULL,
    `last_error` longtext COLLATE `utf8mb4_bin` NULL,
    `cause` character varying(200) COLLATE `utf8mb4_bin` NULL,
    `history` longtext COLLATE `utf8mb4_bin` NULL,
    `result` longtext COLLATE `utf8mb4_bin` NULL,
    `locked_by` character varying(128) COLLATE `utf8mb4_bin` NULL,
    `locked_at` datetime(6) NULL,
    `key` character varying(255) COLLATE `utf8mb4_bin` NULL,
    `stream` character varying(320) COLLATE `utf8mb4_bin` NULL,
    `seq` bigint NULL,
    `unique_key` character varying(255) COLLATE `utf8mb4_bin` NULL,
    `queue` character varying(64) COLLATE `utf8mb4_bin` DEFAULT 'default' NOT NULL
);

CREATE TABLE `outbox_inbox` (
    `id` bigint AUTO_INCREMENT NOT NULL PRIMARY KEY,
    `source` character varying(128) COLLATE `utf8mb4_bin` NOT NULL,
    `message_id` character varying(255) COLLATE `utf8mb4_bin` NOT NULL,
    `received_at` datetime(6) NOT NULL,
    CONSTRAINT `outbox_inbox_once_cdb4ee2a` UNIQUE (`source`, `message_id`)
);

CREATE TABLE `outbox_operation` (
    `id` bigint AUTO_INCREMENT NOT NULL PRIMARY KEY,
    `kind` character varying(16) COLLATE `utf8mb4_bin` NOT NULL,
    `state` character varying(8) COLLATE `utf8mb4_bin` NOT NULL,
    `about` longtext COLLATE `utf8mb4_bin` NOT NULL,
    `by` character varying(255) COLLATE `utf8mb4_bin` NOT NULL,
    `started_at` datetime(6) NOT NULL,
    `ended_at` datetime(6) NULL,
    `stopped_by` character varying(255) COLLATE `utf8mb4_bin` NOT NULL,
    `filters` longtext COLLATE `utf8mb4_bin` NULL,
    `rate` longtext COLLATE `utf8mb4_bin` NULL,
    `limit` integer NULL,
    `matched` integer NULL,
    `done` integer NOT NULL,
    `skipped` integer NOT NULL,
    `after` character varying(49) COLLATE `utf8mb4_bin` NOT NULL,
    `next_at` datetime(6) NULL
);

CREATE TABLE `outbox_pause` (
    `id` bigint AUTO_INCREMENT NOT NULL PRIMARY KEY,
    `kind` character varying(16) COLLATE `utf8mb4_bin` NOT NULL,
    `name` character varying(255) COLLATE `utf8mb4_bin` NOT NULL,
    `reason` longtext COLLATE `utf8mb4_bin` NOT NULL,
    `paused_at` datetime(6) NOT NULL,
    `paused_by` character varying(255) COLLATE `utf8mb4_bin` NOT NULL,
    `until` datetime(6) NULL,
    `pause_seconds` double precision NULL,
    CONSTRAINT `outbox_pause_once_cdb4ee2a` UNIQUE (`kind`, `name`)
);

CREATE TABLE `outbox_statistics` (
    `id` bigint AUTO_INCREMENT NOT NULL PRIMARY KEY,
    `started_at` datetime(6) NOT NULL,
    `owner` character varying(128) COLLATE `utf8mb4_bin` NOT NULL,
    `listener` character varying(255) COLLATE `utf8mb4_bin` NOT NULL,
    `done` integer NOT NULL,
    `retry` integer NOT NULL,
    `dead` integer NOT NULL,
    `rescued` integer NOT NULL,
    `run_ms` bigint NOT NULL,
    `wait_0` integer NOT NULL,
    `wait_1` integer NOT NULL,
    `wait_2` integer NOT NULL,
    `wait_3` integer NOT NULL,
    `wait_4` integer NOT NULL,
    `wait_5` integer NOT NULL,
    `wait_6` integer NOT NULL,
    `wait_7` integer NOT NULL,
    `wait_8` integer NOT NULL,
    `wait_9` integer NOT NULL,
    `wait_10` integer NOT NULL,
    `wait_11` integer NOT NULL,
    `wait_12` integer NOT NULL,
    `wait_13` integer NOT NULL,
    `wait_14` integer NOT NULL,
    `wait_15` integer NOT NULL,
    `wait_16` integer NOT NULL,
    `run_0` integer NOT NULL,
    `run_1` integer NOT NULL,
    `run_2` integer NOT NULL,
    `run_3` integer NOT NULL,
    `run_4` integer NOT NULL,
    `run_5` integer NOT NULL,
    `run_6` integer NOT NULL,
    `run_7` integer NOT NULL,
    `run_8` integer NOT NULL,
    `run_9` integer NOT NULL,
    `run_10` integer NOT NULL,
    `run_11` integer NOT NULL,
    `run_12` integer NOT NULL,
    `run_13` integer NOT NULL,
    `run_14` integer NOT NULL,
    `run_15` integer NOT NULL,
    `run_16` integer NOT NULL,
    CONSTRAINT `outbox_stats_once_cdb4ee2a` UNIQUE (`owner`, `started_at`, `listener`)
);

CREATE TABLE `outbox_stream` (
    `stream` character varying(320) COLLATE `utf8mb4_bin` NOT NULL PRIMARY KEY,
    `key` character varying(255) COLLATE `utf8mb4_bin` NOT NULL,
    `lane` character varying(64) COLLATE `utf8mb4_bin` DEFAULT '' NOT NULL,
    `seq` bigint NOT NULL,
    `due_at` datetime(6) NULL,
    `rescues` smallint DEFAULT 0 NOT NULL,
    `locked_by` character varying(128) COLLATE `utf8mb4_bin` NULL,
    `locked_at` datetime(6) NULL,
    `queue` character varying(64) COLLATE `utf8mb4_bin` DEFAULT 'default' NOT NULL
);

CREATE INDEX `outbox_event_queue_cdb4ee2a` ON `outbox_event` (`queue`, `available_at`, `id`);

CREATE INDEX `outbox_event_due_cdb4ee2a` ON `outbox_event` (`available_at`, `id`);

CREATE INDEX `outbox_event_stream_cdb4ee2a` ON `outbox_event` (`stream`, `status`, `seq`);

CREATE UNIQUE INDEX `outbox_event_unique_cdb4ee2a` ON `outbox_event` (`unique_key`);

SELECT 1;

SELECT 1;

CREATE INDEX `outbox_operation_open_cdb4ee2a` ON `outbox_operation` (`state`);

CREATE INDEX `outbox_operation_time_cdb4ee2a` ON `outbox_operation` (`started_at`);

CREATE INDEX `outbox_stats_time_cdb4ee2a` ON `outbox_statistics` (`started_at`);

CREATE INDEX `outbox_stream_queue_cdb4ee2a` ON `outbox_stream` (`queue`, `due_at`);

CREATE INDEX `outbox_stream_due_cdb4ee2a` ON `outbox_stream` (`due_at`);
